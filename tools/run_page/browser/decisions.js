// Decisions of the balancer: what each would change, was to save, and saved.

function decisionSection(body) {
  addGains(body);
  const shown = makeScrollBox("Decisions of the balancer");
  const count = make("p", { class: "hint", role: "status" });
  const show = (kind) => {
    const right = run.decisions.filter(
      (one) =>
        kind === "all" || one.kind === kind || (kind === "adopted" && one.adopted),
    );
    const all = plural(run.decisions.length, "decision");
    count.textContent = `${right.length.toLocaleString("en-US")} of ${all}, newest first.`;
    fill(shown, decisionTable(right.reverse()));
  };
  const kinds = [
    ["all", "all kinds"],
    ["adopted", "adopted"],
    ["swap", "swap"],
    ["relayout", "relayout"],
    ["keep", "keep"],
  ];
  const select = labelled("Kind", makeSelect(kinds, "all", show));
  body.append(make("div", { class: "controls" }, select, count), shown);
  show("all");
}

function decisionTable(decisions) {
  const two = (ratio) => (Number.isFinite(ratio) ? ratio.toFixed(2) : "–");
  const three = (number) =>
    Number.isFinite(number) ? Number(number.toPrecision(3)) : null;
  const head = [
    "step",
    "kind",
    "what changes",
    "max/mean",
    "predicted gain (ms a step)",
    "measured gain (ms a step)",
    "predicted cost (s)",
    "held up the run (s)",
    "adopted",
    "why",
  ];
  const rows = decisions.map((one) => {
    const before = two(one.device_max_over_mean_before);
    const isKeep = one.kind === "keep";
    return [
      `${one.step ?? one.collected_step}`,
      make("span", { class: `pill ${one.kind}` }, one.kind),
      changeText(one),
      isKeep ? before : `${before} → ${two(one.device_max_over_mean_after)}`,
      three(1000 * one.modelled_gain_sec),
      gainText(one),
      three(one.modelled_cost_sec),
      three(one.waited_sec),
      adoptionText(one),
      one.why ?? "",
    ];
  });
  return makeTable("Decisions of the balancer", head, rows, { class: "decisions" });
}

/** Return the measured gain with its interval of 95 % confidence. */
function gainText({ gain_msec_measured: gain, gain_msec_spread: spread }) {
  if (!Number.isFinite(gain)) return null;
  const isNoise = Math.abs(gain) <= spread;
  return `${shortNumber(gain, 3)} ± ${shortNumber(spread, 2)}${isNoise ? ", noise" : ""}`;
}

function adoptionText(one) {
  if (one.kind === "keep") return "–";
  if (one.adopted) return `at step ${one.adopt_step}`;
  if (one.replaced_by?.kind === "keep") return `given up at ${one.replaced_by.step}`;
  if (one.replaced_by) return `planned anew at ${one.replaced_by.step}`;
  return one.adopt_step > run.step ? `due at step ${one.adopt_step}` : "no";
}

function changeText(one) {
  if (one.kind === "keep") return "nothing";
  const show = (value) =>
    typeof value === "object" ? JSON.stringify(value) : String(value);
  const parts = Object.entries(one.changes ?? {}).map(([name, pair]) => {
    const isPair = Array.isArray(pair) && pair.length === 2;
    const values = isPair ? `${show(pair[0])} → ${show(pair[1])}` : show(pair);
    return `${name.replaceAll("_", " ")} ${values}`;
  });
  if (Number.isFinite(one.num_moves)) parts.unshift(plural(one.num_moves, "move"));
  return parts.join("; ");
}

/** Add a figure of predicted and measured gains, where some were measured. */
function addGains(body) {
  const all = adoptions.filter(
    (one) => one.gain_msec_measured !== null && Number.isFinite(one.modelled_gain_sec),
  );
  if (all.length < 2) return;
  const x = all.map((one) => one.adopt_step);
  const predicted = all.map((one) => 1000 * one.modelled_gain_sec);
  const measured = all.map((one) => one.gain_msec_measured);
  const points = { type: "scatter", mode: "markers", x, hovertemplate: "%{y:,.3~r}" };
  addFigure(body, {
    id: "gains",
    title: "Gain of each change, predicted beside measured",
    unit: "ms a step",
    height: 260,
    caption:
      "Measured: median step time of the 20 steps before, minus that of the 20 after. " +
      "Bars: 95 % confidence by the scatter of these steps; one that crosses 0 is noise. " +
      "They do not know of other work, such as a compilation that ends at an adoption.",
    draw: () => ({
      traces: [
        {
          type: "scatter",
          mode: "lines",
          x: x.flatMap((at) => [at, at, null]),
          y: x.flatMap((_, i) => [predicted[i], measured[i], null]),
          hoverinfo: "skip",
          showlegend: false,
          line: { color: MUTED, width: 1 },
        },
        {
          ...points,
          y: predicted,
          name: "predicted",
          marker: { size: 9, symbol: "circle-open", color: LINES[0], line: { width: 2 } },
        },
        {
          ...points,
          y: measured,
          name: "measured",
          error_y: {
            type: "data",
            array: all.map((one) => one.gain_msec_spread),
            color: LINES[1],
            thickness: 1,
          },
          marker: { size: 9, symbol: "diamond", color: LINES[1] },
        },
      ],
      layout: baseLayout({ yaxis: { zeroline: true, zerolinecolor: MUTED } }),
    }),
    table: () => ({
      head: ["adopted at step", "kind", "predicted", "measured"],
      rows: all.map((one, i) => [
        String(x[i]),
        one.kind,
        predicted[i],
        gainText(one),
      ]),
    }),
  });
}
