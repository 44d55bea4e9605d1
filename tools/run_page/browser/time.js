// Where the time went, and what the cost model had predicted.

const PARTS = {
  experts: "experts, mean rows",
  wait: "wait for the fullest device",
  wires: "wires, exchanges of rows",
  copies: "copies, not hidden",
  blocks: "blocks, the rest",
};

function addGoodput(body) {
  const { share, wall_sec, down_sec, num_attempts, step, sec } = run.goodput;
  const rank = (name) =>
    (settings.buckets.indexOf(name) + settings.buckets.length) %
    settings.buckets.length;
  const names = Object.keys(share)
    .filter((name) => share[name] > 0)
    .sort((a, b) => rank(a) - rank(b));
  const down = down_sec > 0 ? `, and ${duration(down_sec)} between attempts` : "";
  const spent = `${duration(wall_sec)} in ${plural(num_attempts, "attempt")}${down}.`;
  body.append(
    make("p", {}, spent),
    makeTable(
      "Shares of the wall time",
      ["bucket", "share of the wall time", ""],
      names.map((name) => {
        const bar = make("span", { class: "bar" });
        bar.style.width = `${100 * share[name]}%`;
        const text = share[name] < 0.001 ? "< 0.1 %" : percent(share[name]);
        return [name, text, make("span", { class: "rail" }, bar)];
      }),
      { class: "shares" },
    ),
  );
  const total = step.map((_, i) =>
    names.reduce((sum, name) => sum + (sec[name]?.[i] ?? 0), 0),
  );
  addAreas(body, {
    id: "goodput-time",
    title: "Shares of the time so far",
    unit: "by step",
    step,
    parts: names.map((name) => [
      name,
      total.map((all, i) => (all ? (sec[name]?.[i] ?? 0) / all : null)),
    ]),
    isShare: true,
  });
}

function prediction(body) {
  addCurves(body, {
    id: "modelled",
    title: "Time of a step, modelled beside measured",
    unit: "ms",
    series: { step_msec: "measured", modelled_step_msec: "modelled" },
    clip: true,
    smooth: true,
    marks: true,
  });
  const measured = median(curve("step_msec"));
  const modelled = median(curve("modelled_step_msec"));
  const bias = modelled / measured - 1;
  const words =
    `Median ${shortNumber(measured)} ms measured, ${shortNumber(modelled)} ms modelled: ` +
    `the model is ${Math.abs(100 * bias).toFixed(0)} % ` +
    `${bias < 0 ? "below" : "above"} the clock.`;
  body.append(make("p", {}, words));
  const { step } = run.parts_msec;
  if (step.length) {
    addAreas(body, {
      id: "parts",
      title: "Parts of the modelled step",
      unit: "ms",
      step,
      parts: Object.entries(PARTS)
        .map(([name, label]) => [label, run.parts_msec[name]])
        .filter(([, values]) => values.some((value) => value > 0)),
      caption: "Without embedding, head, optimizer and gradients of dense parameters.",
    });
  }
  addCurves(body, {
    id: "saving",
    title: "Modelled saving beside the home plan",
    unit: "ms a step",
    series: { modelled_saving_msec: "saving" },
    height: 200,
    fromZero: true,
    marks: true,
  });
  addCurves(body, {
    id: "waits",
    title: "What changes cost",
    unit: "ms",
    series: {
      adopt_msec: "adopt",
      adopt_wait_msec: "wait to compile",
      plan_wait_msec: "wait for a plan",
    },
    height: 240,
    isLog: true,
    dots: true,
  });
}
