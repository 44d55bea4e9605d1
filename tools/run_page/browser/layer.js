// One layer: which device holds which expert and how full it is, before and after.

const EMPTY = -1;

function oneLayer(body) {
  const changes = plans.slice(1);
  const lastLayer = Math.min(...plans.map((plan) => plan.layers)) - 1;
  const layer = make("input", { type: "number", min: 0, max: lastLayer, value: 0 });
  layer.id = "layer-number";
  const select = makeSelect(
    changes.map((plan, i) => [i, `${plan.kind} at step ${plan.step}`]),
    changes.length - 1,
    () => show(),
  );
  const jump = (sign) => {
    const next = Number(select.value) + sign;
    if (next < 0 || next >= changes.length) return;
    select.value = next;
    show();
  };
  const button = (sign, text) =>
    make("button", { type: "button", class: "quiet", onclick: () => jump(sign) }, text);
  const shown = make("div", { class: "plans" });
  const show = () => {
    const number = Math.round(Number(layer.value));
    const one = Math.min(Math.max(number, 0), lastLayer);
    fill(shown, panels(one, Number(select.value)));
  };
  layer.addEventListener("input", show);
  layer.addEventListener("change", () => {
    layer.value = Math.min(Math.max(Math.round(Number(layer.value)), 0), lastLayer);
  });
  const ofChanges = changes.length
    ? [
        labelled("Change", select),
        button(-1, "Previous change"),
        button(1, "Next change"),
      ]
    : [];
  body.append(
    make("div", { class: "controls" }, labelled("Layer", layer), ...ofChanges),
    legend(),
    shown,
  );
  show();
}

/** Return what the boxes of slots mean. */
function legend() {
  const item = (kind, text, words) =>
    make("li", {}, make("span", { class: `slot ${kind}` }, text), ` ${words}`);
  return make(
    "ul",
    { class: "legend" },
    item("", "7", "an expert in its slot; the colour is its load"),
    item("replica", "7", "one of several replicas"),
    item("new", "+7", "new on this device"),
    item("empty", "\u00a0", "an empty slot"),
  );
}

/** Return panels of the plans before and after a change, or of the only plan. */
function panels(layer, change) {
  if (plans.length === 1) {
    return [planPanel(plans[0], null, layer, { title: "The plan", isLast: false })];
  }
  const [before, after] = [plans[change], plans[change + 1]];
  return [
    planPanel(before, null, layer, {
      title: `Before the ${after.kind}`,
      until: after.step,
      isLast: true,
    }),
    planPanel(after, before, layer, {
      title: `After the ${after.kind}`,
      until: plans[change + 2]?.step,
      isLast: false,
    }),
  ];
}

/** Return a table of devices under a plan that is in use up to step `until`: how full
    each is, at the last or the first recorded step, and the experts in its slots.
    Experts that a device did not hold under the plan `before` are marked as new. */
function planPanel(plan, before, layer, { title, until = Infinity, isLast }) {
  const at = isLast ? until - 1 : plan.step;
  const full = fullness(plan, layer, { until, at });
  const bytes =
    loads && layer < loads.layers
      ? loads.layerAt(nearest(loads.step, at), layer)
      : null;
  const count = replicaCounts(plan, layer);
  const top = full ? Math.max(2, ...full.ratios) : 2;
  const rows = Array.from({ length: plan.num_devices }, (_, device) => {
    const old =
      before && device < before.num_devices ? deviceSlots(before, layer, device) : null;
    const slots = deviceSlots(plan, layer, device).map((expert) =>
      slotBox(expert, {
        byte: bytes?.[expert],
        isReplica: count.get(expert) > 1,
        isNew: old !== null && !old.includes(expert),
      }),
    );
    return [
      `device ${device}`,
      full ? fullBar(full.ratios[device], top) : "–",
      make("span", { class: "slots" }, slots),
    ];
  });
  const worst = full ? full.ratios.indexOf(Math.max(...full.ratios)) : -1;
  const last = Number.isFinite(until) ? ` to ${until - 1}` : " on";
  const facts =
    `Plan ${plan.digest}, steps ${plan.step}${last}; store ${plan.store ?? "unknown"}, ` +
    `${plural(plan.slots_per_device, "slot")} a device.`;
  const fullest = full
    ? `Fullest: device ${worst}, ${shortNumber(full.ratios[worst], 3)} × mean, ${full.text}.`
    : "How full the devices were was not recorded.";
  const head = ["device", "rows / mean", "experts in its slots"];
  return make(
    "section",
    { class: "plan", "aria-label": title },
    make("h3", {}, title),
    make("p", { class: "hint" }, facts),
    make("p", {}, fullest),
    makeScrollBox(title, makeTable(`${title}, layer ${layer}`, head, rows)),
  );
}

/** Return the rows of each device over the mean, nearest to step `at` among the steps of
    the plan, and what they are. */
function fullness(plan, layer, { until, at }) {
  const isRecorded =
    deviceRows?.columns === plan.num_devices && layer < deviceRows.layers;
  const inside = isRecorded
    ? deviceRows.step.filter((step) => step >= plan.step && step < until)
    : [];
  if (inside.length) {
    const step = inside[nearest(inside, at)];
    const bytes = deviceRows.layerAt(deviceRows.step.indexOf(step), layer);
    return {
      ratios: bytes.map((byte) => RATIO[byte]),
      text: `measured at step ${step}`,
    };
  }
  if (!loads || layer >= loads.layers) return null;
  const index = nearest(loads.step, at);
  const bytes = loads.layerAt(index, layer);
  const count = replicaCounts(plan, layer);
  const rows = Array.from({ length: plan.num_devices }, (_, device) =>
    deviceSlots(plan, layer, device)
      .filter((expert) => expert !== EMPTY)
      .reduce((sum, expert) => sum + (RATIO[bytes[expert]] ?? 0) / count.get(expert), 0),
  );
  const mean = rows.reduce((sum, value) => sum + value, 0) / rows.length || 1;
  return {
    ratios: rows.map((value) => value / mean),
    text: `by the load of step ${loads.step[index]}, split evenly over replicas`,
  };
}

function replicaCounts(plan, layer) {
  const count = new Map();
  const first = layer * plan.slots;
  for (const expert of plan.table.subarray(first, first + plan.slots))
    count.set(expert, (count.get(expert) ?? 0) + 1);
  return count;
}

function slotBox(expert, { byte, isReplica, isNew }) {
  if (expert === EMPTY) return make("span", { class: "slot empty", title: "empty" });
  const words = [`expert ${expert}`];
  if (byte !== undefined) words.push(`${shortNumber(RATIO[byte], 3)} × mean load`);
  if (isReplica) words.push("replica");
  if (isNew) words.push("new here");
  const box = make(
    "span",
    {
      class: `slot${isReplica ? " replica" : ""}${isNew ? " new" : ""}`,
      title: words.join(", "),
    },
    `${isNew ? "+" : ""}${expert}`,
  );
  if (byte !== undefined) {
    const [red, green, blue] = mapColor(LOG2[byte]);
    box.style.backgroundColor = rgb([red, green, blue]);
    const isLight = 0.299 * red + 0.587 * green + 0.114 * blue > 140;
    box.style.color = isLight ? "#111" : "#fff";
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
  const bar = make("span", { class: `bar${ratio > 1.2 ? " full" : ""}` });
  bar.style.width = `${(100 * ratio) / top}%`;
  const mean = make("span", { class: "mean" });
  mean.style.left = `${100 / top}%`;
  const rail = make("span", { class: "rail", "aria-hidden": "true" }, bar, mean);
  return make("span", { class: "fullness" }, rail, ` ${ratio.toFixed(2)}`);
}
