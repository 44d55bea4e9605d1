// The data of the page, and arrays decoded from it.

const settings = JSON.parse(document.getElementById("settings").textContent);
const run = JSON.parse(document.getElementById("data").textContent);

/** Return the bytes of base64 text. */
function decoded(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

/** Return the frames of `load` or `rows`: bytes by frame, layer and column. */
function frames(table) {
  if (!table) return null;
  const columns = table.num_experts ?? table.num_devices;
  const bytes = decoded(table.log2_b64);
  const layerAt = (index, layer) => {
    const begin = columns * (index * table.num_layers + layer);
    return Array.from(bytes.subarray(begin, begin + columns));
  };
  return { step: table.step, layers: table.num_layers, columns, layerAt };
}

const loads = frames(run.load);
const deviceRows = frames(run.rows);

/** Load over the mean of the layer, by its byte in a frame. */
const RATIO = Float64Array.from({ length: 256 }, (_, byte) =>
  byte === 0 ? 0 : 2 ** ((byte - 128) / 32),
);
/** Its logarithm to base 2, for colours; a load of 0 is as far down as they go. */
const LOG2 = Float64Array.from({ length: 256 }, (_, byte) =>
  byte === 0 ? -4 : (byte - 128) / 32,
);

/** Return a curve by layer as [point][layer], from half-precision numbers. */
function layerTable(curve) {
  const view = new DataView(decoded(curve.mean_b64).buffer);
  return curve.step.map((_, point) =>
    Array.from({ length: curve.layers }, (_, layer) =>
      halfNumber(view.getUint16(2 * (point * curve.layers + layer), true)),
    ),
  );
}

function halfNumber(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return NaN;
  const size = exponent
    ? (1 + fraction / 1024) * 2 ** (exponent - 15)
    : fraction * 2 ** -24;
  return bits >> 15 ? -size : size;
}

/** The plans of the run, each with its table of slots by layer. */
const plans = run.plans.map((plan) => {
  const table = new Int16Array(decoded(plan.slots_b64).buffer);
  const slots = plan.num_devices * plan.slots_per_device;
  return { ...plan, table, slots, layers: table.length / slots };
});

/** Return the experts in the slots of one device in one layer; -1 is an empty slot. */
function deviceSlots(plan, layer, device) {
  const first = layer * plan.slots + device * plan.slots_per_device;
  return Array.from(plan.table.subarray(first, first + plan.slots_per_device));
}

/** The swaps and relayouts that the run adopted, by step. */
const adoptions = run.decisions
  .filter((one) => one.adopted)
  .sort((a, b) => a.adopt_step - b.adopt_step);

/** Return the index whose value is nearest. */
function nearest(values, wanted) {
  const distances = values.map((value) => Math.abs(value - wanted));
  return distances.indexOf(distances.reduce((a, b) => Math.min(a, b)));
}

function finite(values) {
  return values.filter((value) => Number.isFinite(value));
}

/** Return a quantile of the finite values; between two of them it is interpolated. */
function quantile(values, share) {
  const sorted = finite(values).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const place = share * (sorted.length - 1);
  const [low, high] = [sorted[Math.floor(place)], sorted[Math.ceil(place)]];
  return low + (place - Math.floor(place)) * (high - low);
}

function median(values) {
  return quantile(values, 0.5);
}

/** Return the last finite value, or null. */
function lastOf(values) {
  return finite(values).at(-1) ?? null;
}

/** Return the values of a curve; none where the run does not have it. */
function curve(name) {
  return run.curves[name]?.mean ?? [];
}

/** Return whether the run has a curve with at least one number. */
function hasCurve(name) {
  return finite(curve(name)).length > 0;
}

/** Return a centred moving mean of the finite values, over `width` points. */
function smoothed(values, width) {
  const half = width >> 1;
  let [sum, count] = [0, 0];
  const take = (index, sign) => {
    const value = values[index];
    if (Number.isFinite(value)) [sum, count] = [sum + sign * value, count + sign];
  };
  for (let i = 0; i < Math.min(half, values.length); i += 1) take(i, 1);
  return values.map((_, i) => {
    take(i + half, 1);
    const mean = count ? sum / count : null;
    take(i - half, -1);
    return mean;
  });
}
