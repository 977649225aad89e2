/** The memory plot. Pure: samples in, an SVG path out. */

export type Sample = [number, number];

/** Seconds that the plot shows. */
export const SPAN = 600;

/** Add a sample, and drop what is too old or was replaced within the second. */
export function appended(samples: Sample[], sample: Sample): Sample[] {
  const [at] = sample;
  const kept = samples.filter(([when]) => when > at - SPAN && when < at - 0.5);
  return [...kept, sample];
}

/** Put what was seen meanwhile behind what the server had; the server may have seen some of it, too. */
export function joined(history: Sample[], seen: Sample[]): Sample[] {
  return seen.reduce(appended, history);
}

/** A line over the last ten minutes, in a box of this size; empty for no samples. Use holds until the next. */
export function path(
  samples: Sample[],
  granted: number,
  now: number,
  width: number,
  height: number
): string {
  const x = (at: number): number => round(width * clamp(1 - (now - at) / SPAN));
  const y = (mib: number): number => level(mib, samples, granted, height);
  return samples
    .map(([at, mib], n) => {
      const until = n + 1 < samples.length ? samples[n + 1][0] : now;
      return `${n ? 'L' : 'M'}${x(at)},${y(mib)} L${x(until)},${y(mib)}`;
    })
    .join(' ');
}

/** How far from the top of the box an amount is: all samples and what is granted fit into it. */
export function level(mib: number, samples: Sample[], granted: number, height: number): number {
  const top = Math.max(granted, ...samples.map(([, each]) => each), 1);
  return round(height * (1 - mib / top));
}

function clamp(part: number): number {
  return Math.min(1, Math.max(0, part));
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
