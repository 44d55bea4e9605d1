// Pictures of one figure by layer over steps.

const LAYER_CURVES = {
  device_max_over_mean: "Device max/mean by layer",
  expert_max_over_mean: "Expert max/mean by layer",
  router_entropy: "Router entropy by layer",
};

/** Add a picture of a curve by layer, if the chosen run has it. Ratios begin at 1, which is
    even. */
function addLayerCurve(body, name) {
  const curve = () => run().layer_curves?.[name];
  if (!curve()?.step.length) return;
  const isRatio = name.endsWith("max_over_mean");
  addLayerMap(body, {
    id: `layers-${name.replaceAll("_", "-")}`,
    title: LAYER_CURVES[name],
    unit: isRatio ? "1 is even" : "nats",
    points: () => ({
      step: curve().step,
      layers: curve().layers,
      rows: layerTable(curve()),
    }),
    range: (values) => {
      const low = isRatio ? 1 : quantile(values, 0.01);
      return [low, Math.max(quantile(values, 0.99), low + 0.1)];
    },
    colors: isRatio ? [2, 3, 4] : [4, 2, 0],
    caption: () =>
      run().every_steps > 1
        ? `Each column is the mean of ${run().every_steps} steps or more.`
        : "",
  });
}

/** Add a picture of dead experts by layer, where there were any at a recorded step. */
function addDeadByLayer(body) {
  const all = frames(run().load);
  if (!all || !deadTable(run()).some((row) => row.some((count) => count > 0))) return;
  addLayerMap(body, {
    id: "dead-layers",
    title: "Dead experts by layer",
    unit: "at recorded steps",
    points: () => ({
      step: frames(run().load).step,
      layers: frames(run().load).layers,
      rows: deadTable(run()),
    }),
    range: (values) => [0, Math.max(1, quantile(values, 1))],
    colors: [2, 3, 4],
    caption: () => "",
  });
}

/** Return dead experts by frame and layer: those with a load of 0. */
function deadTable(of) {
  const all = frames(of.load);
  return once(all, () =>
    all.step.map((_, index) =>
      Array.from({ length: all.layers }, (_, layer) => {
        let count = 0;
        for (const byte of all.layerAt(index, layer)) count += byte === 0;
        return count;
      }),
    ),
  );
}

/** Add a picture. `points()` returns {step, layers, rows}, a row of layers for each step;
    `colors` are three places in the scale of loads, from the lowest value to the highest. */
function addLayerMap(body, { id, title, unit, points, range, colors, caption }) {
  addFigure(body, {
    id,
    title,
    unit,
    caption,
    height: () => Math.min(460, 120 + 18 * points().layers),
    describe: () => describeLayers(points()),
    draw: () => {
      const { step, layers, rows } = points();
      const z = Array.from({ length: layers }, (_, layer) =>
        rows.map((row) => row[layer]),
      );
      const [zmin, zmax] = range(z.flat());
      const scale = colors.map((place, index) => [
        index / 2,
        `rgb(${settings.colors[place].join(",")})`,
      ]);
      return {
        traces: [
          {
            type: "heatmap",
            x: step,
            z,
            zmin,
            zmax,
            colorscale: scale,
            colorbar: {
              thickness: 12,
              outlinewidth: 0,
              tickfont: { color: ink("muted"), size: 11 },
            },
            hovertemplate: "step %{x}, layer %{y}: %{z:.3~r}<extra></extra>",
          },
        ],
        layout: baseLayout({
          hovermode: "closest",
          xaxis: { showgrid: false },
          yaxis: {
            ...wholeTicks(layers),
            range: [layers - 0.5, -0.5],
            showgrid: false,
            title: { text: "layer", standoff: 4 },
          },
        }),
      };
    },
    table: () => {
      const { step, layers, rows } = points();
      const cells = (row) =>
        row.map((value) =>
          Number.isFinite(value) ? Number(value.toPrecision(3)) : null,
        );
      return {
        head: [
          "step",
          ...Array.from({ length: layers }, (_, layer) => `layer ${layer}`),
        ],
        ...thinRows(step.map((at, i) => [at, ...cells(rows[i])])),
      };
    },
  });
}

function describeLayers({ layers, rows }) {
  const means = Array.from({ length: layers }, (_, layer) => {
    const values = finite(rows.map((row) => row[layer]));
    return values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
  });
  const order = means.map((_, layer) => layer).sort((a, b) => means[b] - means[a]);
  return (
    `Mean over the steps: highest in layer ${order[0]} (${shortNumber(means[order[0]], 3)}), ` +
    `lowest in layer ${order.at(-1)} (${shortNumber(means[order.at(-1)], 3)}).`
  );
}

/** Return ticks at whole numbers, at most about twelve. */
function wholeTicks(count) {
  const stride = [1, 2, 4, 8, 16, 32, 64].find((one) => count / one <= 12) ?? 128;
  return { tickmode: "linear", tick0: 0, dtick: stride };
}
