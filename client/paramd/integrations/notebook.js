// The page's half of paramd.integrations.notebook. Everything that the job names is set as text.

/** So few names are shown without opening anything, those that a filter leaves for example. */
const ALL_OPEN = 40;

function element(tag, props = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
}

/** Names as a tree by their dots: a Map of parts to Maps, or to [name, shape, dtype]. */
function treeOf(names) {
  const root = new Map();
  for (const row of names) {
    const parts = row[0].split(".");
    let at = root;
    for (const part of parts.slice(0, -1)) {
      // A name may also be the beginning of another one.
      const key = `${part}.`;
      if (!at.has(key)) at.set(key, new Map());
      at = at.get(key);
    }
    at.set(parts.at(-1), row);
  }
  return root;
}

function drawTree(tree, chosen, open, path, pick, all) {
  return [...tree].map(([part, below]) => {
    if (below instanceof Map) {
      const here = `${path}${part}`;
      const box = element("div", {}, ...drawTree(below, chosen, open, here, pick, all));
      const details = element("details", { open: all || open.has(here) || chosen.startsWith(here) }, element("summary", {}, element("bdi", { textContent: part })), box);
      details.addEventListener("toggle", () => (details.open ? open.add(here) : open.delete(here)));
      return details;
    }
    const [name, shape, dtype] = below;
    const button = element("button", { type: "button", title: name }, element("bdi", { textContent: part }), ` ${shape} ${dtype}`);
    button.setAttribute("aria-pressed", String(name === chosen));
    button.addEventListener("click", () => pick(name));
    return button;
  });
}

function drawHistogram(canvas, columns) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
  canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
  const filled = columns.filter((column) => column.counts.length > 0);
  const begin = Math.min(...filled.map((column) => column.begin));
  const end = Math.max(...filled.map((column) => column.begin + column.counts.length));
  if (filled.length === 0) return null;
  const ink = canvas.getContext("2d");
  ink.fillStyle = "#1f6feb";
  const wide = canvas.width / columns.length;
  const high = canvas.height / (end - begin);
  columns.forEach((column, x) => {
    const top = Math.max(...column.counts, 1);
    column.counts.forEach((count, at) => {
      if (count === 0) return;
      // Few elements are the ones that one looks for: never invisible.
      ink.globalAlpha = 0.08 + (0.92 * count) / top;
      ink.fillRect(x * wide, (end - 1 - column.begin - at) * high, Math.max(wide, 1), Math.max(high, 1));
    });
  });
  return [begin, end - 1];
}

function render({ model, el }) {
  const title = element("strong");
  const summary = element("span");
  const live = element("input", { type: "checkbox", checked: model.get("live") });
  const problem = element("p", { className: "problem", role: "status" });
  const ranks = element("ul", { className: "ranks", ariaLabel: "Ranks" });
  const search = element("input", { type: "search", placeholder: "filter names", ariaLabel: "Filter names", value: model.get("filter") });
  const tree = element("div", { className: "tree" });
  const more = element("p");
  const caption = element("p");
  const canvas = element("canvas", { role: "img" });
  const left = element("span");
  const right = element("span");
  const root = element(
    "section",
    { className: "paramd", ariaLabel: "paramd" },
    element("header", {}, title, summary, element("label", {}, live, " live")),
    problem,
    ranks,
    element("div", { className: "body" },
      element("div", {}, search, tree, more),
      element("div", {}, caption, canvas, element("div", { className: "axis" }, left, right))),
  );
  el.append(root);
  const open = new Set();
  const tell = (name, value) => {
    model.set(name, value);
    model.save_changes();
  };
  live.addEventListener("change", () => tell("live", live.checked));
  let typing = 0;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => tell("filter", search.value), 200);
  });

  const showStatus = () => {
    const status = model.get("status");
    title.textContent = status.job;
    summary.textContent = status.summary;
    problem.textContent = status.problem;
    const tiles = status.ranks.map(([rank, phase, step, reason]) =>
      element("li", { className: reason ? "bad" : "", title: reason || phase, textContent: `${rank}: ${phase} ${step}` }));
    const counts = Object.entries(status.phases).map(([phase, count]) => element("li", { textContent: `${count} ${phase}` }));
    ranks.replaceChildren(...(tiles.length ? tiles : counts));
  };
  const showNames = () => {
    const names = model.get("names");
    const focused = tree.contains(document.activeElement) ? document.activeElement.title : null;
    tree.replaceChildren(...drawTree(treeOf(names), model.get("name"), open, "", (name) => tell("name", name), names.length <= ALL_OPEN));
    if (focused !== null) [...tree.querySelectorAll("button")].find((one) => one.title === focused)?.focus();
    const hidden = model.get("name_count") - names.length;
    more.textContent = names.length === 0 ? "No name has that in it." : hidden > 0 ? `and ${hidden} more; filter them` : "";
  };
  const showColumns = () => {
    const columns = model.get("columns");
    const last = columns.at(-1);
    const name = model.get("name");
    caption.replaceChildren(element("bdi", { textContent: name }), last ? `: step ${last.step}, norm ${last.norm}, ${last.zeros} zeros, ${last.bad} not finite` : name ? ": …" : "");
    const drawn = drawHistogram(canvas, columns);
    canvas.setAttribute("aria-label", drawn ? `Binary exponents of ${name} over steps` : "No histogram yet");
    left.textContent = drawn ? `step ${columns[0].step}, 2^${drawn[0]} (bottom) to 2^${drawn[1]}` : "";
    right.textContent = drawn ? `step ${last.step}` : "";
  };
  const size = new ResizeObserver(showColumns);
  const watched = [
    ["change:status", showStatus],
    ["change:names", showNames],
    ["change:name_count", showNames],
    ["change:name", showNames],
    ["change:name", showColumns],
    ["change:columns", showColumns],
  ];
  for (const [event, listener] of watched) model.on(event, listener);
  showStatus();
  showNames();
  showColumns();
  size.observe(canvas);
  return () => {
    size.disconnect();
    clearTimeout(typing);
    for (const [event, listener] of watched) model.off(event, listener);
  };
}

export default { render };
