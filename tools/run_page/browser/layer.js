// One layer: which device holds which expert and how full it is, before and after.

const layerStep = { index: null };

function chooseLayer(layer) {
  page.layer = layer;
  for (const view of page.views) view.updateLayer?.();
}

/** Return the steps that the slider of a layer stops at. */
function layerSteps(of) {
  return once(of, () => {
    const steps = [
      ...(of.rows?.step ?? of.load?.step ?? []),
      ...planTables(of).map((p) => p.step),
    ];
    return [...new Set(steps)].sort((a, b) => a - b);
  });
}

function oneLayer(body) {
  const input = make("input", { type: "number", min: 0, step: 1, id: "layer-number" });
  const step = make("input", { type: "range", min: 0, step: 1, id: "layer-step" });
  const output = make("output", { for: "layer-step" });
  const jump = (sign) =>
    make(
      "button",
      {
        type: "button",
        class: "quiet",
        onclick: () => {
          stepToChange(sign);
          view.update();
        },
      },
      sign < 0 ? "Previous change" : "Next change",
    );
  const shown = make("div", { class: "plans" });
  const view = {
    update() {
      const steps = layerSteps(run());
      const plans = planTables(run());
      const index = layerIndex(steps);
      page.layer = Math.min(page.layer, plans[0].layers - 1);
      input.max = plans[0].layers - 1;
      if (document.activeElement !== input) input.value = page.layer;
      step.max = steps.length - 1;
      step.value = index;
      step.setAttribute("aria-valuetext", `step ${steps[index]}`);
      setText(output, `step ${steps[index].toLocaleString("en-US")}`);
      fillIfNew(shown, planPanels(steps[index]));
    },
    updateLayer() {
      input.value = page.layer;
      view.update();
    },
  };
  input.addEventListener("input", () => {
    if (input.value === "") return; // another number may follow
    const last = planTables(run())[0].layers - 1;
    page.layer = Math.min(Math.max(Math.round(Number(input.value)), 0), last);
    if (String(page.layer) !== input.value) input.value = page.layer;
    view.update();
  });
  input.addEventListener("change", () => {
    input.value = page.layer;
  });
  step.addEventListener("input", () => {
    layerStep.index = Number(step.value);
    view.update();
  });
  body.append(
    make(
      "div",
      { class: "controls" },
      labelled("Layer", input),
      labelled("Step", step, output),
      jump(-1),
      jump(1),
    ),
    make(
      "ul",
      { class: "legend" },
      make(
        "li",
        {},
        make("span", { class: "slot sample" }, "7"),
        " an expert in its slot; the colour is its load",
      ),
      make(
        "li",
        {},
        make("span", { class: "slot sample replica" }, "7"),
        " one of several replicas",
      ),
      make(
        "li",
        {},
        make("span", { class: "slot sample new" }, "+7"),
        " new on this device",
      ),
      make("li", {}, make("span", { class: "slot empty" }, "\u00a0"), " an empty slot"),
    ),
    shown,
  );
  view.update();
  page.views.push(view);
}

function layerIndex(steps) {
  if (layerStep.index === null || layerStep.index >= steps.length) {
    const change = planTables(run())
      .filter((plan) => plan.kind !== "start")
      .at(-1);
    layerStep.index = change ? nearest(steps, change.step) : steps.length - 1;
  }
  return layerStep.index;
}

/** Move the step to the change before or after it. */
function stepToChange(sign) {
  const steps = layerSteps(run());
  const now = steps[layerIndex(steps)];
  const changes = planTables(run())
    .filter((plan) => plan.kind !== "start")
    .map((p) => p.step);
  const next =
    sign > 0 ? changes.find((at) => at > now) : changes.findLast((at) => at < now);
  if (next !== undefined) layerStep.index = nearest(steps, next);
}

/** Return panels of the plans before and after the change that is nearest to a step. */
function planPanels(step) {
  const plans = planTables(run());
  const used = Math.max(
    lastAtMost(
      plans.map((plan) => plan.step),
      step,
    ),
    0,
  );
  const changes = plans.map((plan, index) => index).filter((index) => index > 0);
  if (!changes.length) {
    return [
      planPanel(plans[0], null, {
        title: "The plan",
        from: plans[0].step,
        at: step,
        isUsed: true,
      }),
    ];
  }
  const change = changes.reduce((best, index) =>
    Math.abs(plans[index].step - step) < Math.abs(plans[best].step - step)
      ? index
      : best,
  );
  const [before, after] = [plans[change - 1], plans[change]];
  const until = plans[change + 1]?.step ?? Infinity;
  const past = Math.min(step, after.step - 1);
  return [
    planPanel(before, null, {
      title: `Before the ${after.kind}`,
      from: before.step,
      until: after.step,
      at: Math.max(past, before.step),
      isUsed: used === change - 1,
    }),
    planPanel(after, before, {
      title: `After the ${after.kind}`,
      from: after.step,
      until,
      at: Math.min(Math.max(step, after.step), until - 1),
      isUsed: used === change,
    }),
  ];
}

/** Return the rows of each device over the mean, nearest to step `at` among the steps of
    the plan, and what they are. */
function fullness(plan, layer, { from, until = Infinity, at }) {
  const measured = frames(run().rows);
  if (measured && measured.columns === plan.num_devices && layer < measured.layers) {
    const inside = measured.step.filter((step) => step >= from && step < until);
    if (inside.length) {
      const step = inside[nearest(inside, at)];
      const bytes = measured.layerAt(measured.step.indexOf(step), layer);
      return {
        ratios: Array.from(bytes, (byte) => RATIO[byte]),
        text: `measured at step ${step}`,
      };
    }
  }
  const load = frames(run().load);
  if (!load || layer >= load.layers) return null;
  const index = nearest(load.step, at);
  const bytes = load.layerAt(index, layer);
  const count = replicaCounts(plan, layer);
  const rows = Array.from({ length: plan.num_devices }, (_, device) =>
    deviceSlots(plan, layer, device)
      .filter((expert) => expert >= 0)
      .reduce((sum, expert) => sum + RATIO[bytes[expert]] / count.get(expert), 0),
  );
  const mean = rows.reduce((sum, value) => sum + value, 0) / rows.length || 1;
  return {
    ratios: rows.map((value) => value / mean),
    text: `by the load of step ${load.step[index]}, split evenly over replicas`,
  };
}

function replicaCounts(plan, layer) {
  const count = new Map();
  for (const expert of plan.table.subarray(
    layer * plan.slots,
    (layer + 1) * plan.slots,
  )) {
    count.set(expert, (count.get(expert) ?? 0) + 1);
  }
  return count;
}

/** Return a table of devices: how full each is, and the experts in its slots. */
function planPanel(plan, before, { title, from, until = Infinity, at, isUsed }) {
  const layer = page.layer;
  const full = fullness(plan, layer, { from, until, at });
  const load = frames(run().load);
  const bytes =
    load && layer < load.layers ? load.layerAt(nearest(load.step, at), layer) : null;
  const count = replicaCounts(plan, layer);
  const held = (device) =>
    before && device < before.num_devices
      ? new Set(deviceSlots(before, layer, device))
      : null;
  const top = full ? Math.max(2, ...full.ratios) : 2;
  const rows = Array.from({ length: plan.num_devices }, (_, device) => {
    const old = held(device);
    const slots = deviceSlots(plan, layer, device).map((expert) =>
      slotBox(expert, {
        byte: bytes?.[expert],
        isReplica: count.get(expert) > 1,
        isNew: Boolean(old) && !old.has(expert),
      }),
    );
    const ratio = full ? full.ratios[device] : null;
    return [
      `device ${device}`,
      fullBar(ratio, top),
      make("span", { class: "slots" }, slots),
    ];
  });
  const worst = full ? full.ratios.indexOf(Math.max(...full.ratios)) : -1;
  const last = Number.isFinite(until) ? ` to ${until - 1}` : " on";
  return make(
    "section",
    { class: "plan", "aria-label": title },
    make(
      "h3",
      {},
      title,
      isUsed ? make("span", { class: "pill used" }, "in use at this step") : null,
    ),
    make(
      "p",
      { class: "hint" },
      `Plan ${plan.digest}, steps ${from}${last}; store ${plan.store ?? "unknown"}, ` +
        `${plural(plan.slots_per_device, "slot")} a device.`,
    ),
    make(
      "p",
      {},
      full
        ? `Fullest: device ${worst}, ${shortNumber(full.ratios[worst], 3)} × mean, ${full.text}.`
        : "How full the devices were was not recorded.",
    ),
    makeScrollBox(
      `${title}: devices and their experts`,
      makeTable(
        `${title}, layer ${layer}`,
        ["device", "rows / mean", "experts in its slots"],
        rows,
      ),
    ),
  );
}

function slotBox(expert, { byte, isReplica, isNew }) {
  if (expert < 0)
    return make(
      "span",
      { class: "slot empty" },
      make("span", { class: "unseen" }, "empty"),
    );
  const words = [isReplica ? "replica" : null, isNew ? "new here" : null].filter(
    Boolean,
  );
  const load = byte === undefined ? "" : `, ${shortNumber(RATIO[byte], 3)} × mean load`;
  const box = make(
    "span",
    {
      class: `slot${isReplica ? " replica" : ""}${isNew ? " new" : ""}`,
      title: `expert ${expert}${load}${words.length ? `, ${words.join(", ")}` : ""}`,
    },
    `${isNew ? "+" : ""}${expert}`,
    words.length ? make("span", { class: "unseen" }, ` (${words.join(", ")})`) : null,
  );
  if (byte !== undefined) {
    const rgb = mapColor(LOG2[byte]);
    box.style.backgroundColor = `rgb(${rgb.join(",")})`;
    box.style.color =
      0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140 ? "#111" : "#fff";
  }
  return box;
}

/** Return the colour of a load, as in the map of loads. */
function mapColor(log2) {
  const { colors } = settings;
  const place = ((Math.min(2, Math.max(-2, log2)) + 2) / 4) * (colors.length - 1);
  const low = Math.min(Math.floor(place), colors.length - 2);
  return colors[low].map((value, i) =>
    Math.round(value + (place - low) * (colors[low + 1][i] - value)),
  );
}

function fullBar(ratio, top) {
  if (ratio === null) return "–";
  const bar = make("span", { class: `bar${ratio > 1.2 ? " full" : ""}` });
  bar.style.width = `${(100 * ratio) / top}%`;
  const mean = make("span", { class: "mean" });
  mean.style.left = `${100 / top}%`;
  return make(
    "span",
    { class: "fullness" },
    make("span", { class: "rail", "aria-hidden": "true" }, bar, mean),
    ` ${ratio.toFixed(2)}`,
  );
}
