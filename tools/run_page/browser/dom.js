// Elements of the page, made without HTML text: strings become text nodes.

/** Return an element. Attributes whose value is null or false are left out; those that
    begin with "on" are event listeners. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

/** Return a table with a caption for screen readers. The first cell of a row is its
    heading. A cell is text, a number or an element. */
function makeTable(caption, head, rows, attributes = {}) {
  const kind = head.map((_, column) =>
    rows.every((row) => row[column] === null || typeof row[column] === "number")
      ? "number"
      : null,
  );
  const content = (value) =>
    typeof value === "number" ? shortNumber(value) : (value ?? "–");
  const cell = (value, column) =>
    column === 0
      ? make("th", { scope: "row", class: kind[0] }, content(value))
      : make("td", { class: kind[column] }, content(value));
  return make(
    "table",
    attributes,
    make("caption", { class: "unseen" }, caption),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        head.map((text, column) =>
          make("th", { scope: "col", class: kind[column] }, text),
        ),
      ),
    ),
    make(
      "tbody",
      {},
      rows.map((row) => make("tr", {}, row.map(cell))),
    ),
  );
}

/** Return a box that scrolls by itself, so that the page never scrolls sideways. */
function makeScrollBox(label, ...children) {
  return make(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    ...children,
  );
}

/** Return a label that holds a control. */
function labelled(text, control, ...after) {
  return make("label", {}, make("span", {}, text), control, ...after);
}

/** Return a select element; `options` are pairs of a value and a text. */
function makeSelect(options, value, onchange) {
  const select = make(
    "select",
    { onchange: () => onchange(select.value) },
    options.map(([key, text]) => make("option", { value: key }, text)),
  );
  select.value = value;
  return select;
}

/** Replace the children of an element. */
function fill(element, ...children) {
  element.replaceChildren(...children.flat(2).filter((child) => child !== null));
}

/** Return a number with at most `digits` significant digits, and commas. */
function shortNumber(value, digits = 4) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e12))
    return value.toExponential(digits - 1);
  if (Number.isInteger(value) || size >= 10 ** digits)
    return Math.round(value).toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

function percent(share) {
  return Number.isFinite(share) ? `${shortNumber(100 * share, 3)} %` : "–";
}

/** Return seconds as "2 h 5 min", "3 min 20 s" or "4.2 s". */
function duration(sec) {
  if (!Number.isFinite(sec)) return "–";
  if (sec < 60) return `${shortNumber(sec, 2)} s`;
  const minutes = Math.round(sec / 60);
  if (sec < 3600) return `${Math.floor(sec / 60)} min ${Math.floor(sec % 60)} s`;
  return `${Math.floor(minutes / 60).toLocaleString("en-US")} h ${minutes % 60} min`;
}

/** Return bytes as "3.2 MB". */
function bytesText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1)
    [bytes, unit] = [bytes / 1000, unit + 1];
  return `${shortNumber(bytes, 3)} ${units[unit]}`;
}

function plural(count, word) {
  return `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;
}

/** Return unix seconds as "2026-11-25 09:10 UTC". */
function clock(sec) {
  const moment = new Date(1000 * sec);
  return Number.isNaN(moment.getTime())
    ? "–"
    : `${moment.toISOString().slice(0, 16).replace("T", " ")} UTC`;
}
