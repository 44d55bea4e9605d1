// The load of experts, a map of layers and experts with a slider over recorded steps, and
// of devices, a map over the steps.

const MAX_TABLE_EXPERTS = 128;

function loadMap(body) {
  const last = loads.step.length - 1;
  const input = make("input", { type: "range", min: 0, max: last, id: "load-slider" });
  input.value = last;
  const output = make("output", { for: "load-slider" });
  const words = adoptions.length
    ? "Ticks under the slider: swaps (short) and relayouts (tall)."
    : "No plan was adopted in these steps.";
  const redraw = addFigure(body, {
    id: "load-map",
    title: "Load of each expert",
    unit: "over the mean of its layer",
    height: Math.min(640, Math.max(200, 110 + loads.layers * 22)),
    controls: [
      make("div", { class: "controls" }, labelled("Step", input, output)),
      make("div", { class: "marks", "aria-hidden": "true" }, adoptionTicks()),
      make("p", { class: "hint" }, words),
    ],
    caption: "White is the mean, orange above it, blue below.",
    draw: () => drawLoadMap(Number(input.value)),
    table: () => loadTable(Number(input.value)),
  });
  const show = () => {
    const index = Number(input.value);
    const step = loads.step[index].toLocaleString("en-US");
    output.textContent = `step ${step}, ${index + 1} of ${last + 1} recorded`;
  };
  input.addEventListener("input", () => {
    show();
    redraw();
  });
  show();
}

/** Add a map of the rows of each device over the recorded steps, in one layer. */
function deviceMap(body) {
  const { step, layers, columns, layerAt } = deviceRows;
  const last = layers - 1;
  const input = make("input", { type: "number", min: 0, max: last, id: "device-layer" });
  input.value = worstLayer();
  const chosen = () => Math.min(Math.max(Math.round(Number(input.value)), 0), last);
  const bytesOf = (layer) => step.map((_, index) => layerAt(index, layer));
  const redraw = addFigure(body, {
    id: "device-map",
    title: "Rows of each device",
    unit: "over the mean of the layer",
    height: Math.min(640, 130 + 18 * columns),
    controls: [make("div", { class: "controls" }, labelled("Layer", input))],
    caption:
      "White is the mean, orange above it, blue below. Lines: swaps and relayouts.",
    draw: () => {
      const rows = bytesOf(chosen());
      const byDevice = (table) =>
        Array.from({ length: columns }, (_, device) =>
          rows.map((bytes) => table[bytes[device]]),
        );
      const heatmap = {
        ...loadColors(),
        x: step,
        z: byDevice(LOG2),
        customdata: byDevice(RATIO),
        hovertemplate: "step %{x}, device %{y}: %{customdata:.3~r} × mean<extra></extra>",
      };
      const devices = { ...layerAxis(columns), title: { text: "device", standoff: 4 } };
      const layout = baseLayout({ hovermode: "closest", yaxis: devices });
      layout.xaxis.showgrid = false;
      const markers = markTraces();
      if (markers.length) layout.yaxis2 = MARK_AXIS;
      return { traces: [heatmap, ...markers], layout };
    },
    table: () => ({
      head: ["step", ...Array.from({ length: columns }, (_, one) => `device ${one}`)],
      ...thinRows(
        bytesOf(chosen()).map((bytes, i) => [
          step[i],
          ...bytes.map((byte) => Number(RATIO[byte].toPrecision(3))),
        ]),
      ),
    }),
  });
  input.addEventListener("input", redraw);
}

/** Return the layer with the fullest device of all recorded steps. */
function worstLayer() {
  const { step, layers, layerAt } = deviceRows;
  const most = Array.from({ length: layers }, (_, layer) =>
    Math.max(...step.map((_, index) => Math.max(...layerAt(index, layer)))),
  );
  return most.indexOf(Math.max(...most));
}

/** Return ticks of swaps and relayouts under the slider, each at its place between the
    recorded steps. */
function adoptionTicks() {
  const { step } = loads;
  const last = Math.max(1, step.length - 1);
  return adoptions.map(({ kind, adopt_step }) => {
    const after = step.findIndex((at) => at >= adopt_step);
    const place =
      after <= 0
        ? after && last
        : after - (step[after] - adopt_step) / (step[after] - step[after - 1]);
    const tick = make("span", { class: kind, title: `${kind} at step ${adopt_step}` });
    tick.style.left = `${(100 * place) / last}%`;
    return tick;
  });
}

function drawLoadMap(index) {
  const layers = Array.from({ length: loads.layers }, (_, layer) =>
    loads.layerAt(index, layer),
  );
  const heatmap = {
    ...loadColors(),
    z: layers.map((bytes) => bytes.map((byte) => LOG2[byte])),
    customdata: layers.map((bytes) => bytes.map((byte) => RATIO[byte])),
    xgap: loads.columns <= 64 ? 1 : 0,
    ygap: loads.layers <= 32 ? 1 : 0,
    hovertemplate: "layer %{y}, expert %{x}: %{customdata:.3~r} × mean<extra></extra>",
  };
  return {
    traces: [heatmap],
    layout: baseLayout({
      xTitle: "expert",
      hovermode: "closest",
      xaxis: { showgrid: false, range: [-0.5, loads.columns - 0.5] },
      yaxis: layerAxis(loads.layers),
    }),
  };
}

/** Return the form of a map of loads over their mean, by logarithms to the base 2. */
function loadColors() {
  return {
    type: "heatmap",
    zmin: -2,
    zmax: 2,
    colorscale: settings.colors.map((color, i, all) => [i / (all.length - 1), rgb(color)]),
    colorbar: {
      thickness: 12,
      outlinewidth: 0,
      tickvals: [-2, -1, 0, 1, 2],
      ticktext: ["¼ or less", "½", "mean", "2 ×", "4 × or more"],
    },
  };
}

/** Return the loads of a recorded step: of many experts, the three fullest and emptiest
    of each layer. */
function loadTable(index) {
  const layers = Array.from({ length: loads.layers }, (_, layer) =>
    loads.layerAt(index, layer).map((byte) => Number(RATIO[byte].toPrecision(3))),
  );
  const note = `Load over the mean of the layer at step ${loads.step[index]}.`;
  if (loads.columns <= MAX_TABLE_EXPERTS) {
    const head = ["layer", ...layers[0].map((_, expert) => `expert ${expert}`)];
    return { note, head, rows: layers.map((ratios, layer) => [layer, ...ratios]) };
  }
  const rows = layers.map((ratios, layer) => {
    const order = ratios.map((_, expert) => expert);
    order.sort((a, b) => ratios[b] - ratios[a]);
    const words = (experts) =>
      experts.map((expert) => `${expert} (${ratios[expert]})`).join(", ");
    return [layer, words(order.slice(0, 3)), words(order.slice(-3).reverse())];
  });
  return { note, head: ["layer", "fullest experts", "emptiest experts"], rows };
}
