"""``scorekeep completion SHELL``: a completion script, made from the parser itself."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

__all__ = ["SHELLS", "render_completion", "run_completion"]

SHELLS = ("bash", "zsh", "fish")

_BASH = """_scorekeep() {{
  local word path="" each words=""
  for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$each" in -*) ;; *) case "$path $each" in {paths}) path="$path $each";; esac;; esac
  done
  case "$path" in
{cases}
  esac
  word="${{COMP_WORDS[COMP_CWORD]}}"
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _scorekeep scorekeep
"""


def run_completion(
    options: argparse.Namespace, create: Callable[[], argparse.ArgumentParser]
) -> int:
    """Print the script of the shell."""
    sys.stdout.write(render_completion(create(), options.shell))
    return 0


def render_completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that completes the parser's commands, actions and options."""
    found = list(_walk(parser, ()))
    if shell == "fish":
        return "".join(_render_fish(path, each) for path, each in found)
    cases = "\n".join(
        f'    "{"".join(f" {word}" for word in path)}") words="{" ".join(_words_of(each))}";;'
        for path, each in found
    )
    paths = "|".join(f'"{"".join(f" {word}" for word in path)}"' for path, _ in found if path)
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return head + _BASH.format(cases=cases, paths=paths)


def _walk(
    parser: argparse.ArgumentParser, path: Sequence[str]
) -> Iterator[tuple[Sequence[str], argparse.ArgumentParser]]:
    yield path, parser
    for name, child in _children(parser).items():
        yield from _walk(child, (*path, name))


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:  # noqa: SLF001  # argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    actions = parser._actions  # noqa: SLF001
    return [name for each in actions for name in each.option_strings if name.startswith("--")]


def _words_of(parser: argparse.ArgumentParser) -> list[str]:
    return [*_children(parser), *_options(parser)]


def _render_fish(path: Sequence[str], parser: argparse.ArgumentParser) -> str:
    seen = [f"__fish_seen_subcommand_from {word}" for word in path]  # each word, not any of them
    when = "; and ".join(seen) or "__fish_use_subcommand"
    lines = [f"complete -c scorekeep -n '{when}' -a {name}\n" for name in _children(parser)]
    lines += [
        f"complete -c scorekeep -n '{when}' -l {name.removeprefix('--')}\n"
        for name in _options(parser)
    ]
    return "".join(lines)
