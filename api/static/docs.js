// Shows /openapi.json: operations by tag, their parameters, bodies, answers and errors.
const main = document.querySelector("#operations");

function make(name, text, ...children) {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
}

function nameOf(schema) {
  if (!schema || Object.keys(schema).length === 0) return "anything";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(nameOf).join(" or ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${nameOf(schema.items)}`;
  if (schema.format) return `${schema.type} (${schema.format})`;
  return Array.isArray(schema.type) ? schema.type.join(" or ") : schema.type ?? "anything";
}

function table(head, rows) {
  const header = make("tr");
  header.append(...head.map((each) => make("th", each)));
  const body = rows.map((cells) => {
    const row = make("tr");
    row.append(...cells.map((cell) => (cell instanceof Node ? cell : make("td", String(cell ?? "")))));
    return row;
  });
  return make("table", "", make("thead", "", header), make("tbody", "", ...body));
}

function schemas(schema, all, seen = new Set()) {
  if (!schema || typeof schema !== "object") return [];
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    if (seen.has(name)) return [];
    seen.add(name);
    return [name, ...schemas(all[name], all, seen)];
  }
  return Object.values(schema).flatMap((each) => schemas(each, all, seen));
}

function fields(name, schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([field, each]) => [
    field,
    nameOf(each),
    required.has(field) ? "required" : "default" in each ? JSON.stringify(each.default) : "",
  ]);
  const box = make("details", "", make("summary", `${name}: ${schema.description ?? ""}`));
  const inner = rows.length ? table(["field", "type", "default"], rows) : make("code", nameOf(schema));
  const body = make("div", "", inner);
  body.className = "body";
  box.append(body);
  return box;
}

function show(method, path, operation, all) {
  const title = make("summary");
  const word = make("span", method.toUpperCase());
  word.className = "method";
  title.append(word, make("code", path), ` ${operation.summary}`);
  const body = make("div");
  body.className = "body";
  if (operation.description) body.append(make("p", operation.description));
  if (operation.parameters.length) {
    const rows = operation.parameters.map((each) => [each.name, each.in, nameOf(each.schema), each.description]);
    body.append(make("h3", "Parameters"), table(["name", "in", "type", ""], rows));
  }
  const used = [];
  for (const [media, each] of Object.entries(operation.requestBody?.content ?? {})) {
    body.append(make("h3", "Body"), make("p", `${media}: ${nameOf(each.schema)}`));
    used.push(...schemas(each.schema, all));
  }
  const answers = Object.entries(operation.responses).map(([status, answer]) => {
    const kinds = Object.entries(answer.content ?? {});
    if (status < "300") used.push(...kinds.flatMap(([, each]) => schemas(each.schema, all)));
    return [status, answer.description, kinds.map(([media, each]) => `${media}: ${nameOf(each.schema)}`).join("; ")];
  });
  body.append(make("h3", "Answers"), table(["status", "", "body"], answers));
  body.append(...[...new Set(used)].map((name) => fields(name, all[name])));
  const box = make("details", "", title, body);
  box.dataset.words = `${method} ${path} ${operation.summary} ${operation.tags.join(" ")}`.toLowerCase();
  return box;
}

function render(api) {
  document.querySelector("#version").textContent = api.info.version;
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      if (!groups.has(tag)) groups.set(tag, make("section", "", make("h2", tag)));
      groups.get(tag).append(show(method, path, operation, api.components.schemas));
    }
  }
  main.replaceChildren(...groups.values());
}

document.querySelector("#filter").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  for (const box of main.querySelectorAll("section > details")) {
    box.hidden = !words.every((word) => box.dataset.words.includes(word));
  }
});

try {
  const answer = await fetch("openapi.json"); // beside this page, also below a proxy's path
  if (!answer.ok) throw new Error(`the service said ${answer.status}`);
  render(await answer.json());
} catch (error) {
  const told = make("p", `The document cannot be shown: ${error.message}`);
  told.className = "error";
  main.replaceChildren(told);
}
