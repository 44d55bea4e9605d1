// The first section: where each run stands, in figures and words.

const STATE_SIGNS = {
  running: "▶",
  finished: "✓",
  stopped: "■",
  crashed: "✕",
  empty: "○",
};

function statePill(of) {
  return make(
    "span",
    { class: `pill ${of.state}` },
    make("span", { "aria-hidden": "true" }, STATE_SIGNS[of.state] ?? "?"),
    ` ${of.state}`,
  );
}

const NUM_RECENT = 20;

/** Return the median of the last points of a curve. */
function recent(of, name) {
  return median((of.curves?.[name]?.mean ?? []).slice(-NUM_RECENT));
}

/** Say what `recent` returns: a long run has no single steps. */
function recentText(of) {
  return of.every_steps > 1
    ? `median of ${NUM_RECENT} bins`
    : `median of the last ${NUM_RECENT}`;
}

/** Return the latest figures of a run: [label, value, remark]. */
function latest(of) {
  const last = (name) => lastOf(of.curves?.[name]?.mean ?? []);
  const held = finite(of.evals?.loss ?? []);
  const counts = (kind) => adoptions(of).filter((one) => one.kind === kind).length;
  const useful = of.goodput?.share?.useful;
  const home = recent(of, "home_device_max_over_mean");
  const unevenness = recent(of, "device_max_over_mean");
  const mfu = recent(of, "mfu");
  return [
    [
      "step",
      of.step.toLocaleString("en-US"),
      of.num_steps ? `of ${of.num_steps.toLocaleString("en-US")}` : "",
    ],
    ["loss", shortNumber(last("loss")), "nats per token"],
    [
      "held-out loss",
      shortNumber(held.at(-1)),
      held.length > 1 ? `lowest ${shortNumber(quantile(held, 0))}` : "",
    ],
    [
      "tokens per second",
      shortNumber(recent(of, "tok_per_sec")),
      recentText(of),
    ],
    ["ms per step", shortNumber(recent(of, "step_msec")), recentText(of)],
    ["MFU", percent(mfu), mfu === null ? "no peak is known" : recentText(of)],
    [
      "goodput",
      percent(useful),
      of.goodput ? `of ${duration(of.goodput.wall_sec)}` : "not recorded",
    ],
    [
      "device max/mean",
      shortNumber(unevenness, 3),
      home === null ? recentText(of) : `at home ${shortNumber(home, 3)}; medians`,
    ],
    ["swaps", String(counts("swap")), plural((of.decisions ?? []).length, "decision")],
    ["relayouts", String(counts("relayout")), ""],
  ];
}

function overview(body) {
  body.append(...(runs().length > 1 ? compared() : single()));
  if (runs().some(hasSteps)) {
    body.append(
      make(
        "p",
        { class: "hint" },
        "Drag across a figure to zoom in; a double click shows all of it again.",
      ),
    );
  }
}

/** Call `update` now, and again when there are new data. */
function keepUpdated(update) {
  update();
  page.views.push({ update });
}

/** Return the parts of the overview of one run. Each part changes by itself, so that what
    has the keyboard's focus, or was opened, stays. */
function single() {
  const [state, tiles, notes] = [
    make("div", { class: "part" }),
    make("div"),
    make("div"),
  ];
  const attempts = makeScrollBox("Attempts");
  const summary = make("summary");
  const count = () => (run().attempts ?? []).length;
  const details = make("details", { open: count() > 1 }, summary, attempts);
  keepUpdated(() => {
    fillIfNew(state, stateLine(run()));
    fillIfNew(tiles, tilesOf(run()));
    fillIfNew(notes, noteList(run()));
    fillIfNew(attempts, attemptTable(run()));
    setText(summary, plural(count(), "attempt"));
    details.hidden = count() === 0;
  });
  return [state, paces(), tiles, notes, details];
}

/** Return a line about the pace of each run that goes on, which changes each second. */
function paces() {
  const lines = runs().map(() => make("p", { class: "hint" }));
  const show = () =>
    lines.forEach((line, index) => {
      const of = runs()[index];
      const text = paceText(of);
      setText(line, text && lines.length > 1 ? `${of.name}: ${text}` : text);
    });
  show();
  page.views.push({ update: show, tick: show });
  return make("div", {}, ...lines);
}

/** Return how long ago a run that goes on did its last step, and how long the rest will
    take; an empty text of any other. */
function paceText(of) {
  if (!page.data.live || of.state !== "running" || !hasSteps(of)) return "";
  const parts = [];
  if (Number.isFinite(of.step_at)) {
    const sec = Math.max(0, Math.round(serverSec() - of.step_at));
    parts.push(`Last step ${duration(sec)} ago.`);
  }
  const msec = recent(of, "step_msec");
  const count = (of.num_steps ?? 0) - of.step;
  if (msec !== null && count > 0) {
    parts.push(
      `${plural(count, "step")} to go, about ${duration((count * msec) / 1000)} ` +
        "without evaluations, saves and waits.",
    );
  }
  return parts.join(" ");
}

function stateLine(of) {
  const share =
    of.num_steps && hasSteps(of) ? Math.min(1, of.step / of.num_steps) : null;
  // The text may begin with the name of the state, which stands before it.
  const text = of.state_text.startsWith(of.state)
    ? of.state_text.slice(of.state.length).replace(/^[:;,]? */, "")
    : of.state_text;
  return [
    make("p", { class: "state" }, statePill(of), ` ${text}`),
    share === null
      ? null
      : make("progress", {
          max: 1,
          value: share,
          "aria-label": `step ${of.step} of ${of.num_steps}`,
        }),
  ];
}

function tilesOf(of) {
  if (!hasSteps(of))
    return "Loss, speed, load and the other sections appear with the first step.";
  return make(
    "dl",
    { class: "tiles" },
    latest(of).map(([label, value, remark]) =>
      make(
        "div",
        {},
        make("dt", {}, label),
        make("dd", {}, value, make("small", {}, remark)),
      ),
    ),
  );
}

function noteList(of) {
  if (!of.notes?.length) return null;
  const title = runs().length > 1 ? `Notes on ${of.name}` : "Notes";
  return [
    make("h3", {}, title),
    make(
      "ul",
      { class: "notes" },
      of.notes.map((text) => make("li", {}, text)),
    ),
  ];
}

function attemptTable(of) {
  const rows = (of.attempts ?? []).map((one, index) => [
    String(one.attempt ?? index + 1),
    one.step,
    Number.isFinite(one.at) ? clock(one.at) : null,
    one.num_devices ?? null,
    endText(one),
    one.device_kind ?? null,
    one.num_processes ?? null,
    one.moejax ?? null,
    one.jax ?? null,
  ]);
  const head = [
    "attempt",
    "from step",
    "started",
    "devices",
    "end",
    "kind",
    "processes",
    "moejax",
    "jax",
  ];
  return makeTable("Attempts of the run", head, rows, { class: "attempts stack" });
}

/** Return how an attempt ended, as far as it was recorded. */
function endText(attempt) {
  if (attempt.end === undefined || attempt.end === null) return null;
  const at = Number.isFinite(attempt.end_step) ? ` at step ${attempt.end_step}` : "";
  return `${attempt.end}${at}${attempt.why ? `: ${attempt.why}` : ""}`;
}

/** Return what differs between the runs, then their figures side by side. */
function compared() {
  const [differences, figures] = [
    "Differences of the configurations",
    "Figures of the runs",
  ].map((label) => makeScrollBox(label));
  const notes = make("div");
  keepUpdated(() => {
    const pairs = page.data.differences ?? [];
    fillIfNew(
      differences,
      pairs.length
        ? makeTable(
            "Differences of the configurations",
            ["field", ...runs().map(runName)],
            pairs.map(([field, values]) => [field, ...values]),
            { class: "stack" },
          )
        : "Nothing: the configurations are equal, or were not recorded.",
    );
    const all = runs().map(latest);
    const rows = all[0].map(([label], row) => [
      label,
      ...all.map((one) => one[row][1]),
    ]);
    rows.unshift(["state", ...runs().map(statePill)]);
    fillIfNew(
      figures,
      makeTable("Figures of the runs", ["figure", ...runs().map(runName)], rows, {
        class: "stack",
      }),
    );
    fillIfNew(notes, runs().map(noteList));
  });
  return [
    make(
      "div",
      {},
      make("h3", {}, "What differs in their configurations"),
      differences,
    ),
    make(
      "div",
      {},
      make("h3", {}, "Where they stand"),
      make(
        "p",
        { class: "hint" },
        `Tokens, ms, MFU and device max/mean: ${recentText(run())} steps of each run.`,
      ),
      figures,
      paces(),
    ),
    notes,
  ];
}

/** Return the name of a run beside a sample of its line. */
function runName(of, index) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const dashes = {
    solid: "",
    dash: "7 4",
    dot: "2 3",
    dashdot: "7 3 2 3",
    longdash: "10 4",
    longdashdot: "10 3 2 3",
  };
  const set = (element, values) =>
    Object.entries(values).forEach(([name, value]) =>
      element.setAttribute(name, value),
    );
  set(svg, {
    width: 30,
    height: 8,
    "aria-hidden": "true",
    class: "sample",
  });
  set(line, {
    x1: 0,
    x2: 30,
    y1: 4,
    y2: 4,
    stroke: lineColor(index),
    "stroke-width": 3,
    "stroke-dasharray": dashes[dash(index)],
  });
  svg.append(line);
  return make("span", {}, svg, ` ${of.name}`);
}
