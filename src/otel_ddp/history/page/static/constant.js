// The range of an axis on which all values are the same one.

const SHARE = 0.1;
// Means of equal values differ in their last digits.
const EQUAL = 1e-9;

/** A tenth to each side, so that its ticks tell the value; null where values differ. */
export function rangeOfConstant(low, high) {
  const half = Math.abs(high) * SHARE;
  if (!Number.isFinite(half) || half === 0 || high - low > Math.abs(high) * EQUAL) return null;
  return [high - half, high + half];
}

/** Of what is drawn as lines on a linear axis that has no range of its own. */
export function rangeOfLines(traces, axis) {
  if (axis.rangemode || (axis.type || "linear") !== "linear" || traces.some((each) => each.type !== "scatter")) return null;
  let [low, high] = [Infinity, -Infinity];
  for (const { y } of traces) {
    for (const value of y) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return rangeOfConstant(low, high);
}
