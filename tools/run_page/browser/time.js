// Where the time went, and what the cost model had predicted.

const BUCKETS = settings.buckets;

/** Return the buckets that took time in any run, in the order of the docs. */
function usedBuckets() {
  const names = new Set(
    runs().flatMap((of) =>
      Object.entries(of.goodput?.share ?? {})
        .filter(([, share]) => share > 0)
        .map(([name]) => name),
    ),
  );
  return [
    ...BUCKETS.filter((name) => names.has(name)),
    ...[...names].filter((name) => !BUCKETS.includes(name)).sort(),
  ];
}

function addGoodput(body) {
  const having = () => runs().filter((of) => of.goodput);
  addFigure(body, {
    id: "goodput-shares",
    title: "Shares of the wall time",
    unit: "all attempts",
    height: () => (isNarrow() ? 190 : 150) + 46 * runs().length,
    describe: () =>
      having()
        .map(
          (of) =>
            `${of.name}: ${BUCKETS.filter((name) => of.goodput.share[name] > 0)
              .map((name) => `${name} ${percent(of.goodput.share[name])}`)
              .join(", ")}.`,
        )
        .join(" "),
    caption: () =>
      having()
        .map(
          (of) =>
            `${runs().length > 1 ? `${of.name}: ` : ""}` +
            `${duration(of.goodput.wall_sec)} in ${plural(of.goodput.num_attempts, "attempt")}` +
            `${of.goodput.down_sec > 0 ? `, and ${duration(of.goodput.down_sec)} between attempts` : ""}.`,
        )
        .join(" "),
    draw: () => {
      const shown = having();
      const traces = usedBuckets().map((name, index) => ({
        type: "bar",
        orientation: "h",
        name: [
          plain(name),
          ...(shown.length > 1 || isNarrow()
            ? []
            : [plain(shareText(shown[0].goodput.share[name]))]),
        ].join(" "),
        y: shown.map((_, i) => i),
        x: shown.map((of) => of.goodput.share[name] ?? 0),
        text: shown.map((of) => partText(name, of.goodput.share[name] ?? 0)),
        textposition: "inside",
        insidetextanchor: "middle",
        textangle: 0,
        constraintext: "none",
        insidetextfont: { color: isDark() ? "#111" : "#fff", size: 12 },
        marker: {
          color: lineColor(index),
          line: { color: ink("ground"), width: 1 },
          pattern: patternOf(index),
        },
        hovertemplate: "%{x:.1%}",
      }));
      return {
        traces,
        layout: baseLayout({
          barmode: "stack",
          xTitle: "share of the wall time",
          hovermode: "closest",
          bargap: 0.35,
          xaxis: {
            tickformat: ".0%",
            range: [0, 1],
            dtick: isNarrow() ? 0.25 : 0.1,
            ticklabeloverflow: "allow",
          },
          yaxis: {
            showgrid: false,
            automargin: runs().length > 1,
            tickmode: "array",
            tickvals: shown.map((_, i) => i),
            ticktext: shown.map((of) => (runs().length > 1 ? plain(of.name, 18) : "")),
            range: [shown.length - 0.5, -0.5],
          },
        }),
      };
    },
    table: () => ({
      head: ["bucket", ...having().map((of) => of.name)],
      rows: usedBuckets().map((name) => [
        name,
        ...having().map((of) => percent(of.goodput.share[name] ?? 0)),
      ]),
    }),
  });
  if (!run().goodput?.step?.length) return;
  addAreas(body, {
    id: "goodput-time",
    title: "Shares of the time so far",
    unit: "by step",
    areas: () => sharesSoFar(run().goodput),
    describe: () => {
      const { step, parts } = sharesSoFar(run().goodput);
      const useful = parts.find(([name]) => name === "useful");
      return useful
        ? `Useful: ${percent(useful[1][0])} at step ${step[0]}, ${percent(useful[1].at(-1))} ` +
            `at step ${step.at(-1)}.`
        : "";
    },
    yaxis: { tickformat: ".0%", range: [0, 1] },
  });
}

function shareText(share) {
  return share < 0.001 ? "< 0.1 %" : percent(share);
}

/** Return the longest text about a bucket that its part of the bar has room for. */
function partText(name, share) {
  const width = share * (document.getElementById("sections").clientWidth - 120);
  const texts = [`${plain(name)} ${percent(share)}`, percent(share)];
  return texts.find((text) => 7 * text.length < width) ?? "";
}

/** Return the share of each bucket in the time up to each step. */
function sharesSoFar(goodput) {
  const names = Object.keys(goodput.sec).filter(
    (name) => (lastOf(goodput.sec[name]) ?? 0) > 0,
  );
  const rank = (name) => (BUCKETS.indexOf(name) + BUCKETS.length) % BUCKETS.length;
  names.sort((a, b) => rank(a) - rank(b));
  const total = goodput.step.map((_, i) =>
    names.reduce((sum, name) => sum + (goodput.sec[name][i] ?? 0), 0),
  );
  return {
    step: goodput.step,
    parts: names.map((name) => [
      name,
      goodput.sec[name].map((sec, i) => (total[i] ? (sec ?? 0) / total[i] : null)),
    ]),
  };
}

const PARTS = {
  experts: "experts, mean rows",
  wait: "wait for the fullest device",
  wires: "wires, exchanges of rows",
  copies: "copies, not hidden",
  blocks: "blocks, the rest",
};

function prediction(body) {
  addCurves(body, {
    id: "modelled",
    title: "Time of a step, modelled beside measured",
    unit: "ms",
    series: [
      { curve: "step_msec", label: "measured" },
      { curve: "modelled_step_msec", label: "modelled" },
    ],
    fromZero: true,
    clip: true,
    smooth: true,
    marks: true,
  });
  body.append(biasView());
  if (run().parts_msec?.step.length) {
    addAreas(body, {
      id: "parts",
      title: "Parts of the modelled step",
      unit: "ms",
      areas: () => ({
        step: run().parts_msec.step,
        parts: Object.entries(PARTS)
          .filter(([name]) => run().parts_msec[name]?.some((value) => value > 0))
          .map(([name, label]) => [label, run().parts_msec[name]]),
      }),
      describe: () =>
        Object.entries(PARTS)
          .filter(([name]) => run().parts_msec[name])
          .map(
            ([name, label]) =>
              `${label}: median ${shortNumber(median(run().parts_msec[name]), 3)} ms.`,
          )
          .join(" "),
      caption: () =>
        "Without embedding, head, optimizer and gradients of dense parameters.",
    });
  }
  addCurves(body, {
    id: "saving",
    title: "Modelled saving beside the home plan",
    unit: "ms a step",
    series: [{ curve: "modelled_saving_msec", label: "saving" }],
    height: 200,
    fromZero: true,
    marks: true,
  });
  addCurves(body, {
    id: "waits",
    title: "What changes cost",
    unit: "ms",
    series: [
      { curve: "adopt_msec", label: "adopt" },
      { curve: "adopt_wait_msec", label: "wait to compile" },
      { curve: "plan_wait_msec", label: "wait for a plan" },
    ],
    height: 240,
    isLog: true,
    dots: true,
  });
}

/** Return the medians of modelled and measured times, in words, for each run. */
function biasView() {
  const list = make("ul", { class: "notes" });
  const view = {
    update() {
      fill(
        list,
        runs()
          .filter((of) => hasCurve(of, "modelled_step_msec"))
          .map((of) => {
            const [measured, modelled] = ["step_msec", "modelled_step_msec"].map(
              (name) => median(of.curves[name]?.mean ?? []),
            );
            const bias = modelled / measured - 1;
            return make(
              "li",
              {},
              `${of.name}: median ${shortNumber(measured)} ms measured, ` +
                `${shortNumber(modelled)} ms modelled: the model is ${Math.abs(100 * bias).toFixed(0)} % ` +
                `${bias < 0 ? "below" : "above"} the clock.`,
            );
          }),
      );
    },
  };
  view.update();
  page.views.push(view);
  return list;
}
