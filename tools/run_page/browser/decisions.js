// Decisions of the balancer, with prices and reasons.

const MAX_DECISIONS = 300;
const filter = { kind: "all", limit: MAX_DECISIONS };

function decisionSection(body) {
  addGains(body);
  const shown = makeScrollBox("Decisions of the balancer");
  const count = make("p", { class: "hint", role: "status" });
  const more = make(
    "button",
    {
      type: "button",
      class: "quiet",
      onclick: () => {
        filter.limit += MAX_DECISIONS;
        view.update();
      },
    },
    "Show more",
  );
  const kinds = makeSelect(
    [
      ["all", "all kinds"],
      ["adopted", "adopted"],
      ["swap", "swap"],
      ["relayout", "relayout"],
      ["keep", "keep"],
    ],
    filter.kind,
    (value) => {
      [filter.kind, filter.limit] = [value, MAX_DECISIONS];
      view.update();
    },
  );
  const view = {
    update() {
      const all = run().decisions ?? [];
      const right = all.filter(
        (one) =>
          filter.kind === "all" ||
          (filter.kind === "adopted"
            ? one.adopted && one.kind !== "keep"
            : one.kind === filter.kind),
      );
      const last = right.slice(-filter.limit).reverse();
      setText(
        count,
        `${last.length.toLocaleString("en-US")} of ${plural(all.length, "decision")}, newest first.`,
      );
      more.hidden = right.length <= filter.limit;
      fillIfNew(shown, last.length ? decisionTable(last) : "No decision of this kind.");
    },
  };
  body.append(
    make("div", { class: "controls" }, labelled("Kind", kinds), count),
    shown,
    more,
  );
  view.update();
  page.views.push(view);
}

function decisionTable(decisions) {
  const msec = (sec) =>
    Number.isFinite(sec) ? Number((1000 * sec).toPrecision(3)) : null;
  const two = (ratio) => (Number.isFinite(ratio) ? ratio.toFixed(2) : "–");
  const head = [
    "step",
    "kind",
    "what changes",
    "max/mean",
    "predicted gain (ms a step)",
    "measured gain (ms a step)",
    "predicted cost (s)",
    "waited (s)",
    "adopted",
    "why",
  ];
  const rows = decisions.map((one) => [
    `${one.step}`,
    make("span", { class: `pill ${one.kind}` }, one.kind),
    changeText(one),
    one.kind === "keep"
      ? two(one.device_max_over_mean_before)
      : `${two(one.device_max_over_mean_before)} → ${two(one.device_max_over_mean_after)}`,
    msec(one.modelled_gain_sec),
    one.gain_msec_measured ?? null,
    one.modelled_cost_sec ?? null,
    one.waited_sec === null ? null : Number(one.waited_sec.toFixed(3)),
    adoptionText(one),
    one.why ?? "",
  ]);
  return makeTable("Decisions of the balancer", head, rows, { class: "decisions stack" });
}

function adoptionText(one) {
  if (one.kind === "keep") return "–";
  if (one.adopted) return `at step ${one.adopt_step}`;
  if (one.replaced_by?.kind === "keep") return `given up at ${one.replaced_by.step}`;
  if (one.replaced_by) return `planned anew at ${one.replaced_by.step}`;
  return one.adopt_step > run().step ? `due at step ${one.adopt_step}` : "no";
}

function changeText(one) {
  if (one.kind === "keep") return "nothing";
  const show = (value) =>
    typeof value === "object" ? JSON.stringify(value) : String(value);
  const parts = Object.entries(one.changes ?? {}).map(
    ([name, pair]) =>
      `${name.replaceAll("_", " ")} ` +
      (Array.isArray(pair) && pair.length === 2
        ? `${show(pair[0])} → ${show(pair[1])}`
        : show(pair)),
  );
  if (Number.isFinite(one.num_moves)) parts.unshift(plural(one.num_moves, "move"));
  return parts.join("; ");
}

function measuredDecisions() {
  return adoptions(run()).filter(
    (one) =>
      Number.isFinite(one.gain_msec_measured) && Number.isFinite(one.modelled_gain_sec),
  );
}

/** Add a figure of predicted and measured gains, where some were measured. */
function addGains(body) {
  if (measuredDecisions().length < 2) return;
  addFigure(body, {
    id: "gains",
    title: "Gain of each change, predicted beside measured",
    unit: "ms a step",
    height: () => 260,
    caption: () =>
      "Measured: median step time of the 20 steps before, minus that of the 20 after.",
    describe: () => {
      const all = measuredDecisions();
      return (
        `Median predicted ${shortNumber(median(all.map((one) => 1000 * one.modelled_gain_sec)), 3)} ms, ` +
        `median measured ${shortNumber(median(all.map((one) => one.gain_msec_measured)), 3)} ms, ` +
        `over ${plural(all.length, "change")}.`
      );
    },
    draw: () => {
      const all = measuredDecisions();
      const x = all.map((one) => one.adopt_step);
      const predicted = all.map((one) => 1000 * one.modelled_gain_sec);
      const measured = all.map((one) => one.gain_msec_measured);
      const points = {
        type: "scatter",
        mode: "markers",
        x,
        hovertemplate: "%{y:,.3~r}",
      };
      return {
        traces: [
          {
            type: "scatter",
            mode: "lines",
            x: x.flatMap((at) => [at, at, null]),
            hoverinfo: "skip",
            y: all.flatMap((_, i) => [predicted[i], measured[i], null]),
            showlegend: false,
            line: { color: ink("muted"), width: 1 },
          },
          {
            ...points,
            y: predicted,
            name: "predicted",
            marker: {
              size: 9,
              symbol: "circle-open",
              color: lineColor(0),
              line: { width: 2 },
            },
          },
          {
            ...points,
            y: measured,
            name: "measured",
            marker: { size: 9, symbol: "diamond", color: lineColor(1) },
          },
        ],
        layout: baseLayout({ yaxis: { zeroline: true, zerolinecolor: ink("muted") } }),
      };
    },
    table: () => ({
      head: ["adopted at step", "kind", "predicted", "measured"],
      rows: measuredDecisions().map((one) => [
        String(one.adopt_step),
        one.kind,
        Number((1000 * one.modelled_gain_sec).toPrecision(4)),
        one.gain_msec_measured,
      ]),
    }),
  });
}
