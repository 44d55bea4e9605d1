// Curves over steps, areas that add up, and maps of a figure by layer.

const DASHES = ["solid", "dash", "dot", "dashdot"];
const SMOOTHED_STEPS = 11;
const LAYER_TITLES = {
  device_max_over_mean: "Device max/mean by layer",
  expert_max_over_mean: "Expert max/mean by layer",
  router_entropy: "Router entropy by layer",
};

/** Add a figure of curves. `series` maps names of curves to labels; a curve that the run
    does not have is left out. Options: fromZero; clip, to leave out the highest
    hundredth; smooth, for a moving mean; marks, of adoptions; heldOut, for the losses on
    held-out text; dots, not lines; isLog, of the axis up. */
function addCurves(body, { id, title, unit, series, height = 260, ...options }) {
  const lines = Object.entries(series)
    .filter(([name]) => hasCurve(name))
    .map(([name, label], index) => ({
      ...run.curves[name],
      label,
      color: LINES[index],
      dash: DASHES[index],
    }));
  if (!lines.length) return;
  addFigure(body, {
    id,
    title,
    unit,
    height,
    caption: curveCaption(lines[0], options),
    draw: () => drawCurves(lines, options),
    table: () => curveTable(lines),
  });
}

function drawCurves(lines, { clip, smooth, marks, heldOut, dots, isLog, fromZero }) {
  const traces = lines.flatMap((line) => [
    ...bandTraces(line),
    ...meanTraces(line, { smooth, dots }),
  ]);
  if (heldOut && run.evals.step.length) {
    traces.push({
      type: "scatter",
      mode: "markers",
      x: run.evals.step,
      y: run.evals.loss,
      name: "held out",
      marker: { color: LINES[1], size: 8, symbol: "diamond" },
      hovertemplate: "%{y:,.5~r}",
    });
  }
  const markers = marks ? markTraces() : [];
  const yaxis = isLog
    ? { type: "log", dtick: 1, tickformat: ",~r" }
    : { rangemode: fromZero ? "tozero" : "normal" };
  if (clip) yaxis.range = clippedRange(lines);
  const layout = baseLayout({
    yaxis,
    showlegend:
      traces.filter((one) => one.showlegend !== false).length + markers.length > 1,
  });
  if (markers.length) layout.yaxis2 = MARK_AXIS;
  return { traces: [...markers, ...traces], layout };
}

/** Return a range from 0 that leaves out the highest hundredth. */
function clippedRange(lines) {
  const top = Math.max(...lines.map((line) => quantile(line.mean, 0.99)));
  return [0, 1.15 * top || 1];
}

/** Return the band between the smallest and the largest value of each bin. */
function bandTraces({ step, min, max, color, label }) {
  if (!min) return [];
  const good = step.map((_, i) => i).filter((i) => Number.isFinite(min[i]));
  const edge = {
    type: "scatter",
    mode: "lines",
    x: good.map((i) => step[i]),
    line: { width: 0, color },
    hoverinfo: "skip",
    showlegend: false,
    legendgroup: label,
  };
  return [
    { ...edge, y: good.map((i) => min[i]) },
    { ...edge, y: good.map((i) => max[i]), fill: "tonexty", fillcolor: `${color}33` },
  ];
}

/** Return the number of points of a moving mean: the same in all runs, so that curves
    of two runs compare. Bins are means already. */
function windowOf({ min }) {
  return min ? 1 : SMOOTHED_STEPS;
}

/** Return the line of means; where it is smoothed, each step too, faint. */
function meanTraces(line, { smooth, dots }) {
  const { step, mean, min, max, color, label } = line;
  const width = smooth ? windowOf(line) : 1;
  const isSparse = dots || finite(mean).length < 0.5 * mean.length || mean.length < 2;
  const form = { type: "scatter", x: step, legendgroup: label };
  const faint = {
    ...form,
    mode: "lines",
    y: mean,
    line: { color: `${color}55`, width: 1 },
    hoverinfo: "skip",
    showlegend: false,
  };
  const strong = {
    ...form,
    mode: isSparse ? "markers" : "lines",
    y: smoothed(mean, width),
    name: label,
    line: { color, width: 2, dash: line.dash },
    marker: { color, size: 7 },
    hovertemplate: "%{y:,.5~r}%{text}",
    text: step.map((_, i) =>
      min ? ` (${shortNumber(min[i])} to ${shortNumber(max[i])})` : "",
    ),
  };
  return width > 1 ? [faint, strong] : [strong];
}

/** Return what a point is, in words. */
function curveCaption(line, { smooth, clip }) {
  const width = smooth ? windowOf(line) : 1;
  return [
    line.min
      ? `Each point is ${run.every_steps} steps: mean, with smallest and largest.`
      : "",
    width > 1 ? `Faint: each step. Strong: mean of ${width} steps.` : "",
    clip
      ? "The highest hundredth of the points may lie outside; a double click shows all."
      : "",
  ].join(" ");
}

function curveTable(lines) {
  const columns = lines.flatMap((line) =>
    (line.min ? ["mean", "min", "max"] : ["mean"]).map((name) => ({
      head: name === "mean" ? line.label : `${line.label}, ${name}`,
      values: new Map(line.step.map((step, i) => [step, line[name][i]])),
    })),
  );
  const steps = [...new Set(lines.flatMap((line) => line.step))].sort((a, b) => a - b);
  const rows = steps.map((step) => [
    step,
    ...columns.map(({ values }) => values.get(step) ?? null),
  ]);
  return { head: ["step", ...columns.map(({ head }) => head)], ...thinRows(rows) };
}

/** Add a figure of parts that add up, one area on another: `parts` are pairs of a name
    and its values at the steps. */
function addAreas(body, { id, title, unit, step, parts, caption, isShare = false }) {
  const range = isShare
    ? { tickformat: ".0%", range: [0, 1] }
    : { rangemode: "tozero" };
  addFigure(body, {
    id,
    title,
    unit,
    caption,
    height: 280,
    draw: () => ({
      traces: parts.map(([name, values], index) => ({
        type: "scatter",
        mode: "lines",
        stackgroup: "all",
        x: step,
        y: values,
        name: plain(name),
        line: { width: 1, color: LINES[index % LINES.length] },
        hovertemplate: isShare ? "%{y:.1%}" : "%{y:,.4~r}",
      })),
      layout: baseLayout({ yaxis: range }),
    }),
    table: () => ({
      head: ["step", ...parts.map(([name]) => name)],
      ...thinRows(step.map((at, i) => [at, ...parts.map(([, values]) => values[i])])),
    }),
  });
}

/** Add a map of a curve by layer over the steps, if the run has it. A ratio begins at 1,
    which is even. */
function addLayerMap(body, name) {
  const curve = run.layer_curves[name];
  if (!curve) return;
  const { step, layers } = curve;
  const rows = layerTable(curve);
  const isRatio = name.endsWith("max_over_mean");
  addFigure(body, {
    id: `layers-${name.replaceAll("_", "-")}`,
    title: LAYER_TITLES[name],
    unit: isRatio ? "1 is even" : "nats",
    height: Math.min(460, 120 + 18 * layers),
    draw: () => {
      const zmin = isRatio ? 1 : quantile(rows.flat(), 0.01);
      const colors = isRatio ? [2, 3, 4] : [4, 2, 0];
      const heatmap = {
        type: "heatmap",
        x: step,
        z: Array.from({ length: layers }, (_, layer) => rows.map((row) => row[layer])),
        zmin,
        zmax: Math.max(quantile(rows.flat(), 0.99), zmin + 0.1),
        colorscale: colors.map((place, i) => [i / 2, rgb(settings.colors[place])]),
        colorbar: { thickness: 12, outlinewidth: 0 },
        hovertemplate: "step %{x}, layer %{y}: %{z:.3~r}<extra></extra>",
      };
      const axes = { xaxis: { showgrid: false }, yaxis: layerAxis(layers) };
      return {
        traces: [heatmap],
        layout: baseLayout({ hovermode: "closest", ...axes }),
      };
    },
    table: () => ({
      head: ["step", ...rows[0].map((_, layer) => `layer ${layer}`)],
      ...thinRows(step.map((at, i) => [at, ...rows[i]])),
    }),
  });
}

function rgb(color) {
  return `rgb(${color.join(",")})`;
}
