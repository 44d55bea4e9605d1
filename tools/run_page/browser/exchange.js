// Rows that were dropped or ran again, and experts that nobody chose.

/** Add a curve of dropped rows and of steps that ran again, where there were any. */
function addShares(body) {
  const happened = (name) => runs().some((of) =>
    finite(of.curves?.[name]?.mean ?? []).some((value) => value > 0));
  const series = [["dropped_share", "dropped choices"], ["redone", "steps that ran again"]]
    .filter(([name]) => happened(name)).map(([curve, label]) => ({ curve, label }));
  if (!series.length) {
    body.append(make("p", { class: "hint" }, "Nothing was dropped, and no step ran again."));
    return;
  }
  addCurves(body, { id: "drops", title: "Dropped and redone", unit: "shares", height: 220, fromZero: true, series });
}

/** Return dead experts by frame and layer: those with a load of 0. */
function deadTable(of) {
  const all = frames(of.load);
  return once(all, () => all.step.map((_, index) => Array.from({ length: all.layers }, (_, layer) => {
    let count = 0;
    for (const byte of all.layerAt(index, layer)) count += byte === 0;
    return count;
  })));
}

/** Add a picture of dead experts by layer, where there were any at a recorded step. */
function addDeadByLayer(body) {
  const all = () => frames(run().load);
  if (!all() || !deadTable(run()).some((row) => row.some((count) => count > 0))) return;
  addFigure(body, {
    id: "dead-layers", title: "Dead experts by layer", unit: "at recorded steps", height: 240,
    describe: () => {
      const last = deadTable(run()).at(-1);
      const worst = last.indexOf(Math.max(...last));
      return `At step ${all().step.at(-1)}: ${last.reduce((a, b) => a + b, 0)} in all, most in layer `
        + `${worst} (${last[worst]}).`;
    },
    draw: () => {
      const table = deadTable(run());
      const { layers, step } = all();
      const z = Array.from({ length: layers }, (_, layer) => table.map((row) => row[layer]));
      const colors = settings.colors.map((rgb) => `rgb(${rgb.join(",")})`);
      return {
        height: Math.min(460, 120 + 18 * layers),
        traces: [{ type: "heatmap", x: step, z, zmin: 0, zmax: Math.max(1, ...z.flat()),
          colorscale: [[0, colors[2]], [0.5, colors[3]], [1, colors[4]]],
          colorbar: { thickness: 12, outlinewidth: 0, tickfont: { color: ink("muted"), size: 11 } },
          hovertemplate: "step %{x}, layer %{y}: %{z} dead<extra></extra>" }],
        layout: baseLayout({ hovermode: "closest", xaxis: { showgrid: false },
          yaxis: { ...wholeTicks(layers), range: [layers - 0.5, -0.5], showgrid: false,
            title: { text: "layer", standoff: 4 } } }),
      };
    },
    table: () => ({ head: ["step", ...Array.from({ length: all().layers }, (_, l) => `layer ${l}`)],
      ...thinRows(all().step.map((at, i) => [at, ...deadTable(run())[i]])) }),
  });
}
