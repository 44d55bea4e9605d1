// Figures: drawn by plotly when they come near the window, and their numbers as tables.

const LIGHT_LINES = [
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
const DARK_LINES = [
  "#56b4e9",
  "#f08d49",
  "#2fc79b",
  "#e2a1c6",
  "#f2f2f2",
  "#e6b800",
  "#2f7fb8",
  "#9aa3b2",
  "#b86a35",
];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x"];
const MAX_TABLE_ROWS = 200;
const MAX_MARK_LINES = 30;
// Plotly's bar of buttons stays away: one of them sends the figure to another server.
const CONFIG = { responsive: true, displayModeBar: false, doubleClick: false };

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function isNarrow() {
  return window.innerWidth < 700;
}

function lineColor(index) {
  const colors = isDark() ? DARK_LINES : LIGHT_LINES;
  return colors[index % colors.length];
}

function dash(index) {
  return DASHES[index % DASHES.length];
}

function ink(name) {
  return getComputedStyle(document.documentElement)
    .getPropertyValue(`--${name}`)
    .trim();
}

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
    gridcolor: ink("line"),
    linecolor: ink("line"),
    zeroline: false,
    tickfont: { color: ink("muted") },
  };
  const touch = matchMedia("(pointer: coarse)").matches;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: ink("text") },
    margin: { l: 56, r: 20, t: 8, b: 44 },
    dragmode: touch ? false : "zoom",
    hovermode: "x unified",
    hoverlabel: {
      bgcolor: ink("surface"),
      bordercolor: ink("line"),
      namelength: 40,
      font: { color: ink("text") },
    },
    legend: {
      orientation: "h",
      x: 0,
      xanchor: "left",
      y: 1.02,
      yanchor: "bottom",
      traceorder: "normal",
    },
    xaxis: {
      ...axis,
      title: { text: xTitle, standoff: 6, font: { color: ink("muted") } },
      ...xaxis,
    },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const view = entry.target.view;
      view.isNear = entry.isIntersecting;
      if (view.isNear && view.isStale) view.draw();
    }
  },
  { rootMargin: "200px 0px" },
);

/** Call `act` soon, when the browser has nothing else to do. */
function whenIdle(act) {
  if (window.requestIdleCallback) requestIdleCallback(act, { timeout: 2000 });
  else setTimeout(act, 200);
}

/** Add a figure to a section. `spec` has id, title and height(); `draw()` returns traces
    and layout, `describe()` says the main thing in words, `table()` returns head and
    rows. `unit` and `caption()` may be left out; `clips` says that some points
    lie outside at first. */
function addFigure(parent, spec) {
  const plot = make("div", { class: "plot", role: "img", id: `${spec.id}-plot` });
  const caption = make("figcaption");
  const box = makeScrollBox(`Numbers of: ${spec.title}`);
  box.id = `${spec.id}-table`;
  box.hidden = true;
  const button = make(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-expanded": "false",
      "aria-controls": box.id,
    },
    "Show numbers",
  );
  const view = {
    plot,
    isNear: false,
    isStale: true,
    zoom: "none",
    clips: spec.clips,
    update() {
      whenIdle(view.describe);
      setText(caption, spec.caption?.() ?? "");
      // Set before the figure is drawn, so that what is below stays where it is.
      plot.style.height = `${spec.height()}px`;
      if (!box.hidden) view.fillTable();
      view.isStale = true;
      if (view.isNear) view.draw();
    },
    describe() {
      if (!plot.isConnected) return; // the page was built anew
      const title = spec.unit ? `${spec.title}, ${spec.unit}` : spec.title;
      plot.setAttribute("aria-label", `${title}. ${spec.describe()}`);
    },
    draw() {
      view.isStale = false;
      const { traces, layout } = spec.draw();
      keepZoom(view, layout);
      const isFirst = !plot.dataset.drawn;
      Plotly.react(plot, traces, layout, CONFIG);
      if (isFirst) followZoom(view);
      plot.dataset.colors = isDark() ? "dark" : "light";
      plot.dataset.drawn = String(Number(plot.dataset.drawn ?? 0) + 1);
    },
    fillTable() {
      const { head, rows, note } = spec.table();
      fill(
        box,
        note ? make("p", { class: "hint" }, note) : null,
        makeTable(spec.title, head, rows),
      );
    },
  };
  button.addEventListener("click", () => {
    box.hidden = !box.hidden;
    button.setAttribute("aria-expanded", String(!box.hidden));
    setText(button, box.hidden ? "Show numbers" : "Hide numbers");
    if (!box.hidden) view.fillTable();
  });
  const title = make(
    "h3",
    {},
    spec.title,
    spec.unit ? make("span", { class: "unit" }, ` ${spec.unit}`) : null,
  );
  const figure = make(
    "figure",
    { id: spec.id },
    title,
    ...(spec.controls ?? []),
    plot,
    make("div", { class: "under" }, caption, button),
    box,
  );
  parent.append(figure);
  plot.view = view;
  view.update();
  page.views.push(view);
  watcher.observe(plot);
  return view;
}

/** Note when a figure is zoomed. A double click shows the whole figure again; in a whole
    figure that clips, it shows the points outside too. */
function followZoom(view) {
  view.plot.on("plotly_relayout", (change) => {
    if (Object.keys(change).some((key) => key.includes(".range["))) view.zoom = "part";
  });
  view.plot.on("plotly_doubleclick", () => {
    view.zoom = view.zoom === "none" && view.clips ? "all" : "none";
    view.draw();
  });
}

/** Let a new layout have the part of the figure that was zoomed to. */
function keepZoom({ plot, zoom }, layout) {
  for (const name of ["xaxis", "yaxis"]) {
    if (zoom === "part") layout[name].range = [...plot.layout[name].range];
    if (zoom === "all") delete layout[name].range;
  }
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

/** Return vertical lines at the adoptions of a run, on an axis y2 from 0 to 1. Beyond
    MAX_MARK_LINES, swaps are ticks at the bottom. */
function markTraces(of) {
  const all = adoptions(of);
  return ["swap", "relayout"].flatMap((kind) => {
    const steps = all.filter((one) => one.kind === kind).map((one) => one.adopt_step);
    if (!steps.length) return [];
    const top = kind === "swap" && steps.length > MAX_MARK_LINES ? 0.06 : 1;
    return [
      {
        type: "scatter",
        mode: "lines",
        yaxis: "y2",
        hoverinfo: "skip",
        name: plural(steps.length, kind),
        x: steps.flatMap((step) => [step, step, null]),
        y: steps.flatMap(() => [0, top, null]),
        line: {
          width: kind === "swap" ? 1 : 1.6,
          dash: kind === "swap" ? "dot" : "solid",
          color: ink("muted"),
        },
      },
    ];
  });
}

const MARK_AXIS = { overlaying: "y", range: [0, 1], fixedrange: true, visible: false };

/** Return labels at the ends of lines, moved apart where they would touch. `ends` are
    {x, y, text, color}; `range` and `height` are those of the y axis. */
function endLabels(ends, range, height) {
  const gap = 14;
  const place = (y) => (height * (y - range[0])) / (range[1] - range[0] || 1);
  const sorted = ends.filter((end) => Number.isFinite(end.y)).sort((a, b) => a.y - b.y);
  let floor = -Infinity;
  return sorted.map((end) => {
    const wanted = place(end.y);
    const actual = Math.max(wanted, floor + gap);
    floor = actual;
    return {
      x: end.x,
      y: end.y,
      yshift: actual - wanted,
      xanchor: "left",
      xshift: 5,
      text: plain(end.text, 22),
      font: { color: end.color, size: 11 },
      showarrow: false,
    };
  });
}
