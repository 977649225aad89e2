import { TranslationBundle } from '@jupyterlab/translation';
import { VDomRenderer } from '@jupyterlab/ui-components';
import * as React from 'react';

import { FrontSlice } from './front';
import { gpuIcon } from './icon';
import { announcement, needsAction, stale, status } from './texts';

/** A button that says how it stands with the slice in front, and opens the panel. */
export class SliceStatus extends VDomRenderer<FrontSlice> {
  constructor(
    model: FrontSlice,
    private readonly trans: TranslationBundle,
    private readonly open: () => void
  ) {
    super(model);
    this.addClass('jp-GpuSlice-item');
  }

  protected render(): JSX.Element | null {
    const { slice, slices } = this.model;
    if (!slice) {
      return null;
    }
    const now = slices.now();
    const text = status(slice, now, this.trans);
    const name = this.trans.__('GPU slice: %1', text);
    const label = slices.isLive ? name : `${name}. ${stale(this.trans)}`;
    const act = needsAction(slice, now) ? ' jp-mod-act' : '';
    const old = slices.isLive ? '' : ' jp-mod-stale';
    return (
      <button
        type="button"
        className={`jp-GpuSlice-status${act}${old}`}
        title={slice.message ? `${label}\n${slice.message}` : label}
        aria-label={label}
        onClick={this.open}
      >
        <gpuIcon.react tag="span" className="jp-GpuSlice-icon" elementSize="normal" />
        <span className="jp-GpuSlice-text">{text}</span>
      </button>
    );
  }
}

/** Let screen readers tell of changes, politely; the region must be there before its text. */
export function announce(model: FrontSlice, trans: TranslationBundle): void {
  const region = document.createElement('div');
  region.className = 'jp-GpuSlice-live';
  region.setAttribute('role', 'status');
  region.setAttribute('aria-live', 'polite');
  document.body.appendChild(region);
  let kernelId: string | undefined;
  let told = '';
  model.stateChanged.connect(() => {
    const { slice } = model;
    const text = announcement(slice, model.slices.now(), trans);
    // Who turns to another notebook need not be told that all is well there.
    const isQuiet = kernelId !== model.kernelId && (!slice || slice.state === 'held');
    kernelId = model.kernelId;
    if (text !== told) {
      told = text;
      region.textContent = isQuiet ? '' : text;
    }
  });
}
