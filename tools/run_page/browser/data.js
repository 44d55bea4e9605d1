// What the page knows: the data, the run that it shows, and arrays decoded from it.

const settings = JSON.parse(document.getElementById("settings").textContent);

const page = {
  data: null,
  layer: 0,
  views: [], // each has update()
};

function runs() {
  return page.data.runs;
}

function run() {
  return page.data.runs[0];
}

/** Return the bytes of base64 text. */
function decoded(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text); // browsers since 2025
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

const kept = new WeakMap();

/** Return make(object), computed once for each object. */
function once(object, compute) {
  if (!kept.has(object)) kept.set(object, compute(object));
  return kept.get(object);
}

/** Return the frames of `load` or `rows`: bytes by frame, layer and column. */
function frames(table) {
  if (!table || !table.step.length) return null;
  return once(table, () => {
    const columns = table.num_experts ?? table.num_devices;
    const size = table.num_layers * columns;
    const bytes = decoded(table.log2_b64);
    const at = (index) => bytes.subarray(size * index, size * (index + 1));
    const layerAt = (index, layer) =>
      at(index).subarray(columns * layer, columns * (layer + 1));
    return { step: table.step, layers: table.num_layers, columns, at, layerAt };
  });
}

/** Load over the mean of the layer, by its byte in a frame. */
const RATIO = Float64Array.from({ length: 256 }, (_, byte) =>
  byte === 0 ? 0 : 2 ** ((byte - 128) / 32),
);
/** Its logarithm to base 2, for colours; a load of 0 is as far down as they go. */
const LOG2 = Float64Array.from({ length: 256 }, (_, byte) =>
  byte === 0 ? -4 : (byte - 128) / 32,
);

/** Return half-precision numbers as [point][layer]. */
function layerTable(curve) {
  return once(curve, () => {
    const bytes = decoded(curve.mean_b64);
    const view = new DataView(bytes.buffer);
    return curve.step.map((_, point) =>
      Array.from({ length: curve.layers }, (_, layer) =>
        halfNumber(view.getUint16(2 * (point * curve.layers + layer), true)),
      ),
    );
  });
}

function halfNumber(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const size =
    exponent === 31
      ? NaN
      : exponent
        ? (1 + fraction / 1024) * 2 ** (exponent - 15)
        : fraction * 2 ** -24;
  return bits >> 15 ? -size : size;
}

/** Return the plans of a run, each with its whole table of slots by layer. */
function planTables(of) {
  return once(of.plans ?? [], (plans) => {
    const tables = [];
    for (const plan of plans) {
      const slots = plan.num_devices * plan.slots_per_device;
      let table = null;
      if (plan.slots_b64) table = new Int16Array(decoded(plan.slots_b64).buffer);
      else if (tables.length && plan.changed) {
        table = tables.at(-1).table.slice();
        for (const [layer, slot, expert] of plan.changed)
          table[layer * slots + slot] = expert;
      }
      if (table) tables.push({ ...plan, table, slots, layers: table.length / slots });
    }
    return tables;
  });
}

/** Return the experts in the slots of one device in one layer; -1 is an empty slot. */
function deviceSlots(plan, layer, device) {
  const first = layer * plan.slots + device * plan.slots_per_device;
  return Array.from(plan.table.subarray(first, first + plan.slots_per_device));
}

/** Return the swaps and relayouts that the run adopted, by step. */
function adoptions(of) {
  return once(of.decisions ?? [], (decisions) =>
    decisions
      .filter((one) => one.adopted && one.kind !== "keep")
      .sort((a, b) => a.adopt_step - b.adopt_step),
  );
}

/** Return the last index whose value is at most `limit`; -1 if there is none. */
function lastAtMost(sorted, limit) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Return the index whose value is nearest. */
function nearest(sorted, value) {
  const below = Math.max(lastAtMost(sorted, value), 0);
  const above = Math.min(below + 1, sorted.length - 1);
  return Math.abs(sorted[above] - value) < Math.abs(sorted[below] - value)
    ? above
    : below;
}

/** Return whether a run has done a step. */
function hasSteps(of) {
  return of.step > 0;
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

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i -= 1) {
    if (Number.isFinite(values[i])) return values[i];
  }
  return null;
}

/** Return whether a run has a curve with at least one number. */
function hasCurve(of, name) {
  return Boolean(of.curves?.[name]?.mean.some((value) => Number.isFinite(value)));
}

/** Return whether a curve of a run is above 0 anywhere. */
function isEverAbove0(of, name) {
  return Boolean(of.curves?.[name]?.mean.some((value) => value > 0));
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
