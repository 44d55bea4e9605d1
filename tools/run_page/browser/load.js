// The load of experts: a table of layers and experts with a slider over recorded steps.

const PLAY_MSEC = 200;
const PLAY_SLOWLY_MSEC = 1000;
const MAX_TABLE_CELLS = 4096;

const slider = { index: 0, follows: true, timer: null };

/** Return the frame that the slider is at: the last one while it follows the run. */
function frameIndex(all) {
  if (slider.follows) slider.index = all.step.length - 1;
  return Math.min(slider.index, all.step.length - 1);
}

function colorScale() {
  const { colors } = settings;
  return colors.map((rgb, index) => [
    index / (colors.length - 1),
    `rgb(${rgb.join(",")})`,
  ]);
}

function loadMap(body) {
  const input = make("input", {
    type: "range",
    min: 0,
    step: 1,
    id: "load-slider",
    "aria-describedby": "load-marks-text",
  });
  const output = make("output", { for: "load-slider" });
  const play = make("button", { type: "button", "aria-pressed": "false" }, "Play");
  const marks = make("div", { class: "marks", "aria-hidden": "true" });
  const words = make("p", { class: "hint", id: "load-marks-text" });
  const figure = addFigure(body, {
    id: "load-map",
    title: "Load of each expert",
    unit: "over the mean of its layer",
    height: () => loadMapHeight(),
    controls: [
      make(
        "div",
        { class: "player" },
        play,
        make("div", { class: "track" }, labelled("Step", input), marks),
        output,
      ),
      words,
    ],
    draw: () => drawLoadMap(),
    describe: () => describeLoad(),
    caption: () =>
      "White is the mean, orange above it, blue below. Choose a row to see its " +
      "layer further down.",
    table: () => loadTable(),
  });
  const control = {
    update() {
      const all = frames(run().load);
      const index = frameIndex(all);
      input.max = all.step.length - 1;
      input.value = index;
      const text = `step ${all.step[index].toLocaleString("en-US")}`;
      setText(output, `${text}, ${index + 1} of ${all.step.length} recorded`);
      input.setAttribute("aria-valuetext", text);
      placeMarks(marks, words, all);
    },
  };
  const show = (index) => {
    slider.index = index;
    slider.follows = index === frames(run().load).step.length - 1;
    control.update();
    figure.update();
  };
  input.addEventListener("input", () => show(Number(input.value)));
  play.addEventListener("click", () => togglePlay(play, show));
  page.views.push(control);
  control.update();
  onceDrawn(figure, () =>
    figure.plot.on("plotly_click", ({ points }) => chooseLayer(Number(points[0].y))),
  );
}

/** Call `act` after the first drawing of a figure, when plotly has given it events. */
function onceDrawn(view, act) {
  const { draw } = view;
  view.draw = () => {
    draw();
    view.draw = draw;
    act();
  };
}

function togglePlay(button, show) {
  const isPlaying = slider.timer === null;
  button.setAttribute("aria-pressed", String(isPlaying));
  setText(button, isPlaying ? "Pause" : "Play");
  if (!isPlaying) {
    clearInterval(slider.timer);
    slider.timer = null;
    return;
  }
  const slowly = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const count = () => frames(run().load)?.step.length ?? 0;
  if (slider.index >= count() - 1) show(0);
  slider.timer = setInterval(
    () => {
      if (slider.index < count() - 1 && button.isConnected) show(slider.index + 1);
      else togglePlay(button, show);
    },
    slowly ? PLAY_SLOWLY_MSEC : PLAY_MSEC,
  );
}

/** Put ticks of swaps and relayouts under the slider, each at its place between the
    recorded steps. */
function placeMarks(marks, words, all) {
  const adopted = adoptions(run());
  const last = Math.max(1, all.step.length - 1);
  fill(
    marks,
    adopted.map((one) => {
      const before = lastAtMost(all.step, one.adopt_step);
      const [low, high] = [
        all.step[Math.max(before, 0)],
        all.step[Math.min(before + 1, last)],
      ];
      const part =
        before < 0 || !(high > low) ? 0 : (one.adopt_step - low) / (high - low);
      const tick = make("span", {
        class: one.kind,
        title: `${one.kind} at step ${one.adopt_step}`,
      });
      tick.style.left = `${(100 * Math.min(Math.max(before, 0) + part, last)) / last}%`;
      return tick;
    }),
  );
  const count = (kind) =>
    plural(adopted.filter((one) => one.kind === kind).length, kind);
  setText(
    words,
    adopted.length
      ? `Ticks under the slider: ${count("swap")} (short) and ${count("relayout")} (tall).`
      : "No plan was adopted in these steps.",
  );
}

function loadMapHeight() {
  const { layers } = frames(run().load);
  return Math.min(640, Math.max(isNarrow() ? 240 : 200, 110 + layers * 22));
}

function drawLoadMap() {
  const all = frames(run().load);
  const index = frameIndex(all);
  const [z, ratio] = [[], []];
  for (let layer = 0; layer < all.layers; layer += 1) {
    const bytes = all.layerAt(index, layer);
    z.push(Array.from(bytes, (byte) => LOG2[byte]));
    ratio.push(Array.from(bytes, (byte) => RATIO[byte]));
  }
  const narrow = isNarrow();
  const bar = narrow
    ? { orientation: "h", y: -0.28, yanchor: "top", thickness: 10 }
    : { thickness: 12, outlinewidth: 0 };
  return {
    traces: [
      {
        type: "heatmap",
        z,
        customdata: ratio,
        zmin: -2,
        zmax: 2,
        colorscale: colorScale(),
        xgap: all.columns <= 64 ? 1 : 0,
        ygap: all.layers <= 32 ? 1 : 0,
        hovertemplate:
          "layer %{y}, expert %{x}: %{customdata:.3~r} × mean<extra></extra>",
        colorbar: {
          ...bar,
          tickvals: [-2, -1, 0, 1, 2],
          ticktext: narrow
            ? ["≤ ¼", "½", "mean", "2 ×", "≥ 4 ×"]
            : ["¼ or less", "½", "mean", "2 ×", "4 × or more"],
          ticklabeloverflow: "allow",
          tickfont: { color: ink("muted"), size: 11 },
        },
      },
    ],
    layout: baseLayout({
      xTitle: "expert",
      hovermode: "closest",
      xaxis: { showgrid: false, range: [-0.5, all.columns - 0.5] },
      yaxis: {
        ...wholeTicks(all.layers),
        title: { text: "layer", standoff: 4 },
        range: [all.layers - 0.5, -0.5],
        showgrid: false,
      },
      margin: { l: 56, r: 20, t: 8, b: narrow ? 84 : 44 },
    }),
  };
}

/** Return what a frame says of a layer. */
function layerLoad(all, index, layer) {
  const bytes = Array.from(all.layerAt(index, layer));
  const order = bytes.map((_, expert) => expert).sort((a, b) => bytes[b] - bytes[a]);
  return { bytes, order, dead: bytes.filter((byte) => byte === 0).length };
}

function describeLoad() {
  const all = frames(run().load);
  const index = frameIndex(all);
  const worst = Array.from({ length: all.layers }, (_, layer) => {
    const { bytes, order } = layerLoad(all, index, layer);
    return { layer, expert: order[0], ratio: RATIO[bytes[order[0]]] };
  }).sort((a, b) => b.ratio - a.ratio)[0];
  return (
    `At step ${all.step[index]} the fullest expert is expert ${worst.expert} of layer ` +
    `${worst.layer}, with ${shortNumber(worst.ratio, 3)} times the mean of its layer.`
  );
}

function loadTable() {
  const all = frames(run().load);
  const index = frameIndex(all);
  const layers = Array.from({ length: all.layers }, (_, layer) => layer);
  const three = (value) => Number(value.toPrecision(3));
  const note = `Load over the mean of the layer at step ${all.step[index]}.`;
  if (all.layers * all.columns <= MAX_TABLE_CELLS) {
    return {
      note,
      head: ["layer", ...Array(all.columns).keys()].map((name) =>
        name === "layer" ? name : `expert ${name}`,
      ),
      rows: layers.map((layer) => [
        layer,
        ...Array.from(all.layerAt(index, layer), (byte) => three(RATIO[byte])),
      ]),
    };
  }
  const rows = layers.map((layer) => {
    const { bytes, order, dead } = layerLoad(all, index, layer);
    const name = (expert) => `${expert} (${three(RATIO[bytes[expert]])})`;
    return [
      layer,
      order.slice(0, 3).map(name).join(", "),
      order.slice(-3).reverse().map(name).join(", "),
      dead,
    ];
  });
  return {
    note: `${note} The three fullest and emptiest experts of each layer.`,
    head: ["layer", "fullest experts", "emptiest experts", "dead experts"],
    rows,
  };
}
