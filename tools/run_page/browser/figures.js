// Figures: drawn by plotly when they come near the window, and their numbers as tables.

const LINES = [
  "#0072b2",
  "#d55e00",
  "#00795a",
  "#a8447f",
  "#111111",
  "#8a6100",
  "#4ba3d9",
  "#6b7280",
  "#b4530a",
];
const GROUND = "#ffffff";
const TEXT = "#1b2230";
const MUTED = "#566072";
const GRID = "#dde1e7";
const MAX_TABLE_ROWS = 200;
const MAX_MARK_LINES = 30;
// Plotly's bar of buttons stays away: one of them sends the figure to another server.
const CONFIG = { responsive: true, displayModeBar: false };

/** Return text that plotly shows as it is: it reads tags and %{..} otherwise. */
function plain(text, maxLength = 60) {
  const letters = Array.from(String(text));
  const short =
    letters.length > maxLength
      ? `${letters.slice(0, maxLength - 1).join("")}…`
      : letters.join("");
  return short
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll("%{", "%\u200b{");
}

/** Return a layout of plotly in the colours of the page. */
function baseLayout({ xTitle = "step", xaxis = {}, yaxis = {}, ...rest } = {}) {
  const axis = {
    gridcolor: GRID,
    linecolor: GRID,
    zeroline: false,
    tickfont: { color: MUTED },
  };
  const title = { text: xTitle, standoff: 6, font: { color: MUTED } };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: TEXT },
    margin: { l: 56, r: 20, t: 8, b: 44 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: GROUND, bordercolor: GRID, namelength: 40 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
    xaxis: { ...axis, title, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      target.draw();
    }
  },
  { rootMargin: "200px 0px" },
);

/** Add a figure to a section. `spec` has id, title and height; `draw()` returns traces
    and layout, `table()` head and rows; `unit`, `caption` and `controls`, elements above
    the figure, may be left out. Return a function that draws the figure again. */
function addFigure(parent, spec) {
  const name = spec.unit ? `${spec.title}, ${spec.unit}` : spec.title;
  const plot = make("div", {
    class: "plot",
    role: "img",
    id: `${spec.id}-plot`,
    "aria-label": name,
  });
  plot.style.height = `${spec.height}px`;
  const box = makeScrollBox(`Numbers of: ${spec.title}`);
  box.id = `${spec.id}-table`;
  box.hidden = true;
  const fillTable = () => {
    const { head, rows, note } = spec.table();
    const hint = note ? make("p", { class: "hint" }, note) : null;
    fill(box, hint, makeTable(spec.title, head, rows));
  };
  const button = make("button", { type: "button", class: "quiet" }, "Show numbers");
  button.addEventListener("click", () => {
    box.hidden = !box.hidden;
    button.textContent = box.hidden ? "Show numbers" : "Hide numbers";
    if (!box.hidden) fillTable();
  });
  plot.draw = () => {
    const { traces, layout } = spec.draw();
    Plotly.react(plot, traces, layout, CONFIG);
    plot.dataset.drawn = "true";
  };
  const unit = spec.unit ? make("span", { class: "unit" }, ` ${spec.unit}`) : null;
  parent.append(
    make(
      "figure",
      { id: spec.id },
      make("h3", {}, spec.title, ...(unit ? [unit] : [])),
      ...(spec.controls ?? []),
      plot,
      make("div", { class: "under" }, make("figcaption", {}, spec.caption ?? ""), button),
      box,
    ),
  );
  watcher.observe(plot);
  return () => {
    if (plot.dataset.drawn) plot.draw();
    if (!box.hidden) fillTable();
  };
}

/** Return at most MAX_TABLE_ROWS rows, evenly picked with the last, and a note. */
function thinRows(rows) {
  if (rows.length <= MAX_TABLE_ROWS) return { rows };
  const stride = Math.ceil(rows.length / MAX_TABLE_ROWS);
  return {
    rows: rows.filter((_, i) => i % stride === 0 || i === rows.length - 1),
    note: `One of each ${stride} of ${rows.length.toLocaleString("en-US")} points, and the last.`,
  };
}

const MARK_AXIS = { overlaying: "y", range: [0, 1], fixedrange: true, visible: false };

/** Return vertical lines at the adoptions of the run, on the axis MARK_AXIS. Beyond
    MAX_MARK_LINES, swaps are ticks at the bottom. */
function markTraces() {
  return ["swap", "relayout"].flatMap((kind) => {
    const steps = adoptions
      .filter((one) => one.kind === kind)
      .map((one) => one.adopt_step);
    if (!steps.length) return [];
    const isSwap = kind === "swap";
    const top = isSwap && steps.length > MAX_MARK_LINES ? 0.06 : 1;
    return [
      {
        type: "scatter",
        mode: "lines",
        yaxis: "y2",
        hoverinfo: "skip",
        name: plural(steps.length, kind),
        x: steps.flatMap((step) => [step, step, null]),
        y: steps.flatMap(() => [0, top, null]),
        line: { width: isSwap ? 1 : 1.6, dash: isSwap ? "dot" : "solid", color: MUTED },
      },
    ];
  });
}

/** Return ticks at whole numbers, at most about twelve. */
function wholeTicks(count) {
  const stride = [1, 2, 4, 8, 16, 32, 64].find((one) => count / one <= 12) ?? 128;
  return { tickmode: "linear", tick0: 0, dtick: stride };
}

/** Return the axis of a map's layers, the first one on top. */
function layerAxis(layers) {
  return {
    ...wholeTicks(layers),
    title: { text: "layer", standoff: 4 },
    range: [layers - 0.5, -0.5],
    showgrid: false,
  };
}
