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
  body.append(...overviewParts());
  if (hasSteps(run())) {
    body.append(
      make(
        "p",
        { class: "hint" },
        "Drag across a figure to zoom in; a double click shows all of it again.",
      ),
    );
  }
}

function overviewParts() {
  const attempts = run().attempts ?? [];
  const table = makeScrollBox("Attempts");
  table.append(attemptTable(run()));
  const title = make("summary", {}, plural(attempts.length, "attempt"));
  const details = make("details", { open: attempts.length > 1 }, title, table);
  details.hidden = attempts.length === 0;
  return [
    make("div", { class: "part" }, stateLine(run())),
    make("div", {}, tilesOf(run())),
    make("div", {}, noteList(run())),
    details,
  ];
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
  return [
    make("h3", {}, "Notes"),
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
