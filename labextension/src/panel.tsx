import { ISessionContext } from '@jupyterlab/apputils';
import { TranslationBundle } from '@jupyterlab/translation';
import { VDomRenderer } from '@jupyterlab/ui-components';
import { Message } from '@lumino/messaging';
import * as React from 'react';

import { Actions } from './actions';
import { ISlice } from './contract';
import { FrontSlice } from './front';
import { gpuIcon } from './icon';
import { MemoryPlot } from './memory';
import { about, idleOthers, needsAction, rows, stale, status } from './texts';

export const PANEL = 'jupyter-gpu-pool-panel';

/** All about the slice of the notebook or console in front, beside it. */
export class SlicePanel extends VDomRenderer<FrontSlice> {
  constructor(
    model: FrontSlice,
    private readonly trans: TranslationBundle,
    private readonly leave: () => void
  ) {
    super(model);
    this.id = PANEL;
    this.addClass('jp-GpuSlice-panel');
    this.title.icon = gpuIcon;
    this.title.caption = trans.__('GPU slice');
    this.node.tabIndex = -1;
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('GPU slice'));
    this.node.addEventListener('keydown', event => {
      if (event.key === 'Escape') {
        this.leave();
      }
    });
  }

  protected onActivateRequest(msg: Message): void {
    this.node.focus();
  }

  /** Keep the focus where it is, also when the button that had it is not offered any more. */
  protected onUpdateRequest(msg: Message): void {
    const hadFocus = this.node.contains(document.activeElement);
    super.onUpdateRequest(msg);
    void this.renderPromise?.then(() => {
      if (hadFocus && document.activeElement === document.body) {
        this.node.focus();
      }
    });
  }

  protected render(): JSX.Element {
    const { trans, model } = this;
    const { slice, slices } = model;
    return (
      <>
        <h2>{trans.__('GPU slice')}</h2>
        {!slices.isLive && slices.state && <p className="jp-GpuSlice-stale">{stale(trans)}</p>}
        {slice ? this.renderSlice(slice) : <p>{this.whyNone()}</p>}
        {slices.state?.pools
          .filter(pool => !pool.reachable || pool.message)
          .map(pool => (
            <p key={pool.url} className="jp-GpuSlice-stale">
              {pool.message || trans.__('The GPU pool does not answer at the moment.')}
            </p>
          ))}
      </>
    );
  }

  private renderSlice(slice: ISlice): JSX.Element {
    const { trans, model } = this;
    const now = model.slices.now();
    const message = slice.end_message || slice.message;
    return (
      <>
        <p className="jp-GpuSlice-about">{about(slice, model.path)}</p>
        <p className={`jp-GpuSlice-state${needsAction(slice, now) ? ' jp-mod-act' : ''}`}>
          {status(slice, now, trans)}
        </p>
        {message && <p>{message}</p>}
        <dl>
          {rows(slice, now, trans).map(({ label, value }) => (
            <div key={label}>
              <dt>{label}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
        <MemoryPlot
          key={`plot ${slice.kernel_id}`}
          slice={slice}
          slices={model.slices}
          trans={trans}
        />
        <Actions
          key={`do ${slice.kernel_id}`}
          slice={slice}
          others={idleOthers(slice, model.slices.state?.slices ?? [])}
          slices={model.slices}
          restart={() => model.restart(slice.kernel_id)}
          trans={trans}
        />
      </>
    );
  }

  private whyNone(): string {
    const { trans, model } = this;
    if (!model.slices.state) {
      return trans.__('What the kernel in front has is not known now.');
    }
    const context = (model.widget as any)?.sessionContext as ISessionContext | undefined;
    return context?.session?.kernel
      ? trans.__(
          'The kernel in front has no GPU slice. Choose a kernel with GPU in its name to get one.'
        )
      : trans.__('No notebook or console with a kernel is in front.');
  }
}
