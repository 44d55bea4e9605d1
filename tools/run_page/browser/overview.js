// The first section: where each run stands, in figures and words.

const STATE_SIGNS = { running: "▶", finished: "✓", stopped: "■", crashed: "✕", empty: "○" };

function statePill(of) {
  return make("span", { class: `pill ${of.state}` },
    make("span", { "aria-hidden": "true" }, STATE_SIGNS[of.state] ?? "?"), ` ${of.state}`);
}

/** Return the latest figures of a run: [label, value, remark]. */
function latest(of) {
  const recent = (name) => median((of.curves?.[name]?.mean ?? []).slice(-20));
  const last = (name) => lastOf(of.curves?.[name]?.mean ?? []);
  const held = finite(of.evals?.loss ?? []);
  const counts = (kind) => adoptions(of).filter((one) => one.kind === kind).length;
  const useful = of.goodput?.share?.useful;
  const home = recent("home_device_max_over_mean");
  const unevenness = recent("device_max_over_mean");
  return [
    ["step", of.step.toLocaleString("en-US"),
      of.num_steps ? `of ${of.num_steps.toLocaleString("en-US")}` : ""],
    ["loss", shortNumber(last("loss")), "nats per token"],
    ["held-out loss", shortNumber(held.at(-1)),
      held.length > 1 ? `lowest ${shortNumber(quantile(held, 0))}` : ""],
    ["tokens per second", shortNumber(recent("tok_per_sec")), "all devices"],
    ["ms per step", shortNumber(recent("step_msec")), "median of the last points"],
    ["MFU", percent(recent("mfu")), recent("mfu") === null ? "no peak is known" : "of peak FLOPs"],
    ["goodput", percent(useful), of.goodput ? `of ${duration(of.goodput.wall_sec)}` : "not recorded"],
    ["device max/mean", shortNumber(unevenness, 3),
      home === null ? "1 is even" : `at home ${shortNumber(home, 3)}`],
    ["swaps", String(counts("swap")), plural((of.decisions ?? []).length, "decision")],
    ["relayouts", String(counts("relayout")), ""],
  ];
}

function overview(body) {
  const hint = runs().every((of) => of.state === "empty") ? null : make("p", { class: "hint" },
    "Drag across a figure to zoom in; a double click shows all of it again.");
  const view = {
    update() {
      fill(body, runs().length > 1 ? compared() : single(run()), hint);
    },
  };
  view.update();
  page.views.push(view);
}

function single(of) {
  const share = of.num_steps ? Math.min(1, of.step / of.num_steps) : null;
  const bar = share === null || of.state === "empty" ? null : make("progress", { max: 1, value: share,
    "aria-label": `step ${of.step} of ${of.num_steps}` });
  const tiles = of.state === "empty"
    ? make("p", {}, "Loss, speed, load and the other sections appear with the first step.") : make("dl", { class: "tiles" },
    latest(of).map(([label, value, remark]) => make("div", {}, make("dt", {}, label),
      make("dd", {}, value, make("small", {}, remark)))));
  return [
    make("p", { class: "state" }, statePill(of), ` ${of.state_text}`),
    bar, tiles, ...noteList(of), attemptList(of),
  ];
}

function noteList(of) {
  if (!of.notes?.length) return [];
  const title = runs().length > 1 ? `Notes on ${of.name}` : "Notes";
  return [make("div", {}, make("h3", {}, title),
    make("ul", { class: "notes" }, of.notes.map((text) => make("li", {}, text))))];
}

function attemptList(of) {
  const attempts = of.attempts ?? [];
  if (!attempts.length) return null;
  const rows = attempts.map((one, index) => [String(one.attempt ?? index + 1), one.step,
    Number.isFinite(one.at) ? clock(one.at) : null, one.num_devices ?? null,
    one.device_kind ?? null, one.num_processes ?? null, one.moejax ?? null, one.jax ?? null]);
  const head = ["attempt", "from step", "started", "devices", "kind", "processes", "moejax", "jax"];
  const table = makeScrollBox("Attempts", makeTable("Attempts of the run", head, rows,
    { class: "attempts" }));
  return make("details", { open: attempts.length > 1 },
    make("summary", {}, plural(attempts.length, "attempt")), table);
}

/** Return what differs between the runs, then their figures side by side. */
function compared() {
  const all = runs();
  const names = () => all.map(runName);
  const differences = page.data.differences ?? [];
  const figures = all.map(latest);
  const rows = figures[0].map(([label], row) => [label, ...figures.map((one) => one[row][1])]);
  rows.unshift(["state", ...all.map(statePill)]);
  return [
    make("div", {}, make("h3", {}, "What differs in their configurations"),
      differences.length ? makeScrollBox("Differences of the configurations",
        makeTable("Differences of the configurations", ["field", ...names()],
          differences.map(([field, values]) => [field, ...values])))
        : make("p", {}, "Nothing: the configurations are equal, or were not recorded.")),
    make("div", {}, make("h3", {}, "Where they stand"),
      makeScrollBox("Figures of the runs", makeTable("Figures of the runs", ["", ...names()], rows))),
    ...all.flatMap(noteList),
  ];
}

/** Return the name of a run beside a sample of its line. */
function runName(of, index) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const dashes = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3",
    longdash: "10 4", longdashdot: "10 3 2 3" };
  const set = (element, values) => Object.entries(values)
    .forEach(([name, value]) => element.setAttribute(name, value));
  set(svg, { width: 30, height: 8, "aria-hidden": "true", class: `sample line-${index % 6}` });
  set(line, { x1: 0, x2: 30, y1: 4, y2: 4, "stroke-width": 3,
    "stroke-dasharray": dashes[dash(index)] });
  svg.append(line);
  return make("span", {}, svg, ` ${of.name}`);
}
