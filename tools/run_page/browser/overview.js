// The first section: where the run stands, in figures and words.

const NUM_RECENT = 20;

/** Return the median of the last points of a curve. */
function recent(name) {
  return median(curve(name).slice(-NUM_RECENT));
}

/** Return the latest figures of the run: [label, value, remark]. */
function latest() {
  const unit = run.every_steps > 1 ? " bins" : "";
  const medians = `median of the last ${NUM_RECENT}${unit}`;
  const heldOut = finite(run.evals.loss);
  const count = (kind) => adoptions.filter((one) => one.kind === kind).length;
  const home = recent("home_device_max_over_mean");
  const mfu = recent("mfu");
  const number = (value) => value.toLocaleString("en-US");
  return [
    ["step", number(run.step), run.num_steps ? `of ${number(run.num_steps)}` : ""],
    ["loss", shortNumber(lastOf(curve("loss"))), "nats per token"],
    [
      "held-out loss",
      shortNumber(heldOut.at(-1)),
      heldOut.length > 1 ? `lowest ${shortNumber(Math.min(...heldOut))}` : "",
    ],
    ["tokens per second", shortNumber(recent("tok_per_sec")), medians],
    ["ms per step", shortNumber(recent("step_msec")), medians],
    ["MFU", percent(mfu), mfu === null ? "no peak is known" : medians],
    [
      "goodput",
      percent(run.goodput?.share.useful),
      run.goodput ? `of ${duration(run.goodput.wall_sec)}` : "not recorded",
    ],
    [
      "device max/mean",
      shortNumber(recent("device_max_over_mean"), 3),
      home === null ? medians : `at home ${shortNumber(home, 3)}; medians`,
    ],
    ["swaps", String(count("swap")), plural(run.decisions.length, "decision")],
    ["relayouts", String(count("relayout")), ""],
  ];
}

function overview(body) {
  // The text may begin with the name of the state, which stands before it.
  const text = run.state_text.startsWith(run.state)
    ? run.state_text.slice(run.state.length).replace(/^[:;,]? */, "")
    : run.state_text;
  const pill = make("span", { class: `pill ${run.state}` }, run.state);
  body.append(make("p", { class: "state" }, pill, ` ${text}`));
  if (!run.step) {
    const hint = "Loss, speed, load and the other sections appear with the first step.";
    body.append(make("p", { class: "hint" }, hint));
  } else {
    const tile = ([label, value, remark]) =>
      make(
        "div",
        {},
        make("dt", {}, label),
        make("dd", {}, value, make("small", {}, remark)),
      );
    const hint =
      "Drag across a figure to zoom in; a double click shows all of it again.";
    body.append(
      make("dl", { class: "tiles" }, latest().map(tile)),
      make("p", { class: "hint" }, hint),
    );
  }
  if (run.notes.length) {
    const notes = run.notes.map((note) => make("li", {}, note));
    body.append(make("h3", {}, "Notes"), make("ul", { class: "notes" }, notes));
  }
  if (run.attempts.length) {
    body.append(
      make(
        "details",
        { open: run.attempts.length > 1 },
        make("summary", {}, plural(run.attempts.length, "attempt")),
        makeScrollBox("Attempts", attemptTable()),
      ),
    );
  }
}

function attemptTable() {
  const head = ["attempt", "from step", "started", "devices", "end", "kind"];
  const rows = run.attempts.map((one) => [
    String(one.attempt),
    one.step ?? null,
    Number.isFinite(one.at) ? clock(one.at) : null,
    one.num_devices ?? null,
    endText(one),
    one.device_kind ?? null,
  ]);
  return makeTable("Attempts of the run", head, rows, { class: "attempts" });
}

/** Return how an attempt ended, as far as it was recorded. */
function endText(attempt) {
  if (!attempt.end) return null;
  const at = Number.isFinite(attempt.end_step) ? ` at step ${attempt.end_step}` : "";
  return `${attempt.end}${at}${attempt.why ? `: ${attempt.why}` : ""}`;
}
