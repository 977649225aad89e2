import { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { ISlice } from './contract';
import { appended, joined, level, path, Sample } from './plot';
import { memory } from './texts';
import { ISlices } from './tokens';

const WIDTH = 240;
const HEIGHT = 60;

interface IProps {
  slice: ISlice;
  slices: ISlices;
  trans: TranslationBundle;
}

/** The memory of the last ten minutes; nothing where it is not measured. */
export function MemoryPlot({ slice, slices, trans }: IProps): JSX.Element | null {
  const [samples, setSamples] = React.useState<Sample[]>([]);
  const { granted_mib, allowed_mib, used_mib: used = null } = slice.memory ?? {};
  const granted = allowed_mib ?? granted_mib ?? 0;
  const now = slices.now();
  const isMeasured = used !== null;
  React.useEffect(() => {
    if (!isMeasured) {
      return;
    }
    let isShown = true;
    // Asked once; what comes later is part of the states.
    slices.memory(slice.kernel_id).then(
      history => isShown && setSamples(seen => joined(history.samples, seen)),
      () => undefined
    );
    return () => {
      isShown = false;
    };
  }, [slice.kernel_id, isMeasured]);
  React.useEffect(() => {
    if (used !== null) {
      setSamples(known => appended(known, [slices.now(), used]));
    }
  }, [used]);
  if (!granted || !samples.length) {
    return null;
  }
  const top = level(granted, samples, granted, HEIGHT);
  const most = Math.max(...samples.map(([, mib]) => mib));
  return (
    <figure>
      <svg
        role="img"
        viewBox={`0 -2 ${WIDTH} ${HEIGHT + 4}`}
        aria-label={trans.__(
          'GPU memory in the last ten minutes: now %1, at most %2',
          memory(used, granted, trans),
          memory(most, granted, trans)
        )}
      >
        <line x1={0} y1={top} x2={WIDTH} y2={top} className="jp-GpuSlice-granted" />
        <line x1={0} y1={HEIGHT} x2={WIDTH} y2={HEIGHT} className="jp-GpuSlice-axis" />
        <path d={path(samples, granted, now, WIDTH, HEIGHT)} className="jp-GpuSlice-line" />
      </svg>
      <figcaption>
        <span>{trans.__('10 min ago')}</span>
        <span>{trans.__('now')}</span>
      </figcaption>
    </figure>
  );
}
