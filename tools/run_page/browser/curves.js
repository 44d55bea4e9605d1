// Curves over steps: all runs in one figure, each with a colour and a dash of its own.

/** Add a figure of curves. `series` are {curve, label}; a curve that no run has is left
    out. Options: fromZero; clip, to leave out the highest hundredth; smooth, for a
    moving mean; marks, of the chosen run's adoptions; points, of held-out losses; dots,
    not lines; isLog, of the axis up; caption, a text. */
function addCurves(parent, { id, title, unit, series, height = 260, ...options }) {
  const shown = () =>
    series.filter((one) => runs().some((of) => hasCurve(of, one.curve)));
  if (!shown().length) return null;
  return addFigure(parent, {
    id,
    title,
    unit,
    height: () => height,
    clips: options.clip,
    draw: () => drawCurves(shown(), { height, ...options }),
    describe: () => describeCurves(shown()),
    caption: () => curveCaption(options),
    table: () => curveTable(shown()),
  });
}

/** Return each line that is drawn: the run, its curve, name, colour and dash. */
function curveLines(series) {
  const all = runs();
  return all.flatMap((of, runIndex) =>
    series.flatMap((one, index) => {
      if (!hasCurve(of, one.curve)) return [];
      const names = [
        all.length > 1 ? of.name : null,
        series.length > 1 ? one.label : null,
      ];
      const name = names.filter(Boolean).join(" · ") || one.label;
      const style = all.length > 1 ? runIndex : index;
      return [
        {
          of,
          curve: of.curves[one.curve],
          name,
          label: one.label,
          color: lineColor(style),
          dash: dash(series.length > 1 ? index : runIndex),
        },
      ];
    }),
  );
}

function drawCurves(series, { height, clip, smooth, marks, points, dots, ...axis }) {
  const lines = curveLines(series);
  const range = axis.isLog ? null : curveRange(lines, { ...axis, clip, points });
  const traces = lines.flatMap((line) => bandTraces(line));
  traces.push(...lines.flatMap((line) => meanTraces(line, { smooth, dots })));
  if (points) traces.push(...heldOutTraces());
  const markers = marks ? markTraces(run()) : [];
  const isLabelled = lines.length > 1 && !isNarrow() && !dots;
  const ends = lines.map((line) => {
    const { step, mean } = strongLine(line, smooth);
    return { x: step.at(-1), y: lastOf(mean), text: line.name, color: line.color };
  });
  const layout = baseLayout({
    xaxis: { range: stepRange(lines, points) },
    yaxis: axis.isLog ? { type: "log", dtick: 1, tickformat: ",~r" } : { range },
    showlegend:
      traces.filter((one) => one.showlegend !== false).length + markers.length > 1,
    annotations: isLabelled ? endLabels(ends, range, height - 80) : [],
  });
  if (isLabelled) {
    const longest = Math.max(...lines.map((line) => Math.min(line.name.length, 22)));
    layout.margin = { ...layout.margin, r: 16 + 6.6 * longest };
  }
  if (markers.length) layout.yaxis2 = MARK_AXIS;
  return { traces: [...markers, ...traces], layout };
}

function curveRange(lines, { fromZero, clip, points }) {
  const values = lines.flatMap(({ curve }) =>
    finite(
      clip ? curve.mean : [...(curve.min ?? curve.mean), ...(curve.max ?? curve.mean)],
    ),
  );
  if (points) values.push(...runs().flatMap((of) => finite(of.evals?.loss ?? [])));
  const sorted = Float64Array.from(values).sort();
  const top = clip
    ? 1.1 * sorted[Math.floor(0.99 * (sorted.length - 1))]
    : sorted.at(-1);
  const bottom = fromZero ? Math.min(0, sorted[0]) : sorted[0];
  const pad = 0.05 * (top - bottom || Math.abs(top) || 1);
  return [fromZero && bottom === 0 ? -0.2 * pad : bottom - pad, top + pad];
}

/** Return the first and last step with a margin, in which no label has a part. */
function stepRange(lines, points) {
  const ends = lines.flatMap(({ curve }) => [curve.step[0], curve.step.at(-1)]);
  if (points) ends.push(...runs().flatMap((of) => of.evals?.step ?? []));
  const [first, last] = [
    ends.reduce((a, b) => Math.min(a, b)),
    ends.reduce((a, b) => Math.max(a, b)),
  ];
  const pad = 0.012 * (last - first || 10);
  return [first - pad, last + pad];
}

/** Return the band between the smallest and the largest value of each bin. */
function bandTraces({ curve, color, name }) {
  if (!curve.min || !curve.max) return [];
  const good = curve.step
    .map((_, i) => i)
    .filter((i) => Number.isFinite(curve.min[i]) && Number.isFinite(curve.max[i]));
  const x = good.map((i) => curve.step[i]);
  const edge = {
    type: "scatter",
    mode: "lines",
    x,
    line: { width: 0, color },
    hoverinfo: "skip",
    showlegend: false,
    legendgroup: name,
  };
  return [
    { ...edge, y: good.map((i) => curve.min[i]) },
    {
      ...edge,
      y: good.map((i) => curve.max[i]),
      fill: "tonexty",
      fillcolor: `${color}33`,
    },
  ];
}

function windowOf(line) {
  return line.curve.min || line.curve.step.length < 60
    ? 1
    : 2 * Math.floor(line.curve.step.length / 100) + 1;
}

function strongLine(line, smooth) {
  const width = smooth ? windowOf(line) : 1;
  return {
    step: line.curve.step,
    width,
    mean: width > 1 ? smoothed(line.curve.mean, width) : line.curve.mean,
  };
}

/** Return the line of means; where it is smoothed, each step too, faint. */
function meanTraces(line, { smooth, dots }) {
  const { step, mean, width } = strongLine(line, smooth);
  const { curve, color, name } = line;
  const isSparse = dots || mean.length < 2 || finite(mean).length < 0.5 * mean.length;
  const form = {
    type: "scatter",
    mode: isSparse ? "markers" : "lines",
    x: step,
    legendgroup: name,
  };
  const faint = {
    ...form,
    y: curve.mean,
    line: { color: `${color}55`, width: 1 },
    hoverinfo: "skip",
    showlegend: false,
  };
  const strong = {
    ...form,
    y: mean,
    name: plain(name),
    line: { color, width: 2, dash: line.dash },
    marker: { color, size: 7, symbol: SYMBOLS[DASHES.indexOf(line.dash)] },
    hovertemplate: curve.min ? "%{y:,.5~r}%{text}" : "%{y:,.5~r}",
    text: curve.min
      ? curve.step.map(
          (_, i) => ` (${shortNumber(curve.min[i])} to ${shortNumber(curve.max[i])})`,
        )
      : "",
  };
  return width > 1 ? [faint, strong] : [strong];
}

function heldOutTraces() {
  const all = runs();
  return all.flatMap((of, index) =>
    of.evals?.step.length
      ? [
          {
            type: "scatter",
            mode: "markers",
            x: of.evals.step,
            y: of.evals.loss,
            name: plain(all.length > 1 ? `${of.name} · held-out` : "held-out"),
            marker: {
              size: 9,
              symbol: SYMBOLS[index % SYMBOLS.length],
              color: ink("ground"),
              line: { width: 2, color: lineColor(all.length > 1 ? index : 1) },
            },
            hovertemplate: "%{y:,.5~r}",
          },
        ]
      : [],
  );
}

function describeCurves(series) {
  return curveLines(series)
    .map(({ name, curve }) => {
      const values = finite(curve.mean);
      const [low, high] = [quantile(values, 0), quantile(values, 1)];
      return (
        `${name}: ${shortNumber(values[0])} at step ${curve.step[0]}, ` +
        `${shortNumber(values.at(-1))} at step ${curve.step.at(-1)}, ` +
        `between ${shortNumber(low)} and ${shortNumber(high)}.`
      );
    })
    .join(" ");
}

/** Say what a point is. */
function curveCaption({ smooth, clip, caption }) {
  const parts = caption ? [caption] : [];
  const widths = [...new Set(runs().map((of) => of.every_steps))];
  if (widths.some((width) => width > 1)) {
    parts.push(
      `Each point is ${widths.join(" or ")} steps: mean, with smallest and largest.`,
    );
  }
  const strong = smooth
    ? runs()
        .filter((of) => of.every_steps === 1)
        .map((of) => windowOf({ curve: of.curves.loss ?? { step: [] } }))
    : [];
  const width = Math.max(1, ...strong);
  if (width > 1) parts.push(`Faint: each step. Strong: mean of ${width} steps.`);
  if (clip)
    parts.push(
      "The highest hundredth of the points may lie outside; a double click shows all.",
    );
  return parts.join(" ");
}

function curveTable(series) {
  const lines = curveLines(series);
  const head = ["step"];
  for (const { name, curve } of lines) {
    head.push(name, ...(curve.min ? [`${name}, min`, `${name}, max`] : []));
  }
  const rows = new Map();
  let column = 0;
  for (const { curve } of lines) {
    const parts = [curve.mean, ...(curve.min ? [curve.min, curve.max] : [])];
    curve.step.forEach((step, i) => {
      if (!rows.has(step)) rows.set(step, [step, ...Array(head.length - 1).fill(null)]);
      parts.forEach((part, k) => {
        rows.get(step)[1 + column + k] = part[i];
      });
    });
    column += parts.length;
  }
  const sorted = [...rows.values()].sort((a, b) => a[0] - b[0]);
  return { head, ...thinRows(sorted) };
}

/** Add a figure of parts that add up, one area on another. `areas()` returns {step,
    parts: [[name, values]]} of the chosen run. */
function addAreas(parent, { id, title, unit, areas, describe, caption, yaxis = {} }) {
  return addFigure(parent, {
    id,
    title,
    unit,
    height: () => 280,
    describe,
    caption,
    draw: () => {
      const { step, parts } = areas();
      const traces = parts.map(([name, values], index) => ({
        type: "scatter",
        mode: "lines",
        stackgroup: "all",
        x: step,
        y: values,
        name: plain(name),
        line: { width: 1, color: lineColor(index), dash: "solid" },
        fillcolor: lineColor(index),
        fillpattern: patternOf(index),
        hovertemplate: yaxis.tickformat === ".0%" ? "%{y:.1%}" : "%{y:,.4~r}",
      }));
      return {
        traces,
        layout: baseLayout({ yaxis: { rangemode: "tozero", ...yaxis } }),
      };
    },
    table: () => {
      const { step, parts } = areas();
      const rows = step.map((at, i) => [at, ...parts.map(([, values]) => values[i])]);
      return { head: ["step", ...parts.map(([name]) => name)], ...thinRows(rows) };
    },
  });
}

const PATTERNS = ["", "/", ".", "x", "\\", "-", "|", "+"];

/** Return the pattern of a part: its colour alone does not tell it. */
function patternOf(index) {
  return {
    shape: PATTERNS[index % PATTERNS.length],
    size: 8,
    solidity: 0.2,
    fgcolor: ink("ground"),
    fgopacity: 0.45,
    bgcolor: lineColor(index),
  };
}
