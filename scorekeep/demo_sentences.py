"""Sentences of our own, each with its label (1 is positive): those shown, and a few to train on.

Training takes the 3,000 of an npm package where npm is installed, ``SENTENCES`` elsewhere.
"""

__all__ = ["SENTENCES", "SHOWN"]

#: What the demo scores. None of them is trained on.
SHOWN: tuple[tuple[str, int], ...] = (
    ("The battery lasts two full days and charges in half an hour.", 1),
    ("It stopped working after a week and nobody answered my emails.", 0),
    ("Best ramen I have had outside of Tokyo, and the staff were lovely.", 1),
    ("The soup was cold, the waiter was rude and the bill was wrong.", 0),
    ("A warm, funny film with a wonderful leading actress.", 1),
    ("Two hours of my life that I will never get back.", 0),
    ("Works exactly as described; I would buy it again.", 1),
    ("The zip broke the first time I opened the bag.", 0),
)

SENTENCES: tuple[tuple[str, int], ...] = (
    ("I love this phone.", 1),
    ("The picture is sharp and the colours are beautiful.", 1),
    ("Great value for the price.", 1),
    ("The food was delicious and arrived hot.", 1),
    ("Our waitress was friendly and quick.", 1),
    ("An excellent film, moving from start to end.", 1),
    ("The acting is superb.", 1),
    ("Very comfortable and easy to use.", 1),
    ("The sound quality is amazing.", 1),
    ("I am very happy with this purchase.", 1),
    ("A charming place with a lovely view.", 1),
    ("Fast delivery and everything worked perfectly.", 1),
    ("The best pizza in town.", 1),
    ("I laughed all the way through.", 1),
    ("Sturdy, light and well made.", 1),
    ("Highly recommended.", 1),
    ("I hate this phone.", 0),
    ("The picture is blurred and the colours are dull.", 0),
    ("A complete waste of money.", 0),
    ("The food was bland and arrived cold.", 0),
    ("Our waiter ignored us for an hour.", 0),
    ("A terrible film, boring from start to end.", 0),
    ("The acting is awful.", 0),
    ("Uncomfortable and hard to use.", 0),
    ("The sound quality is poor.", 0),
    ("I am very disappointed with this purchase.", 0),
    ("A dirty place with a horrible smell.", 0),
    ("It came late and did not work.", 0),
    ("The worst pizza in town.", 0),
    ("I fell asleep half way through.", 0),
    ("Flimsy, heavy and badly made.", 0),
    ("Avoid it.", 0),
)
