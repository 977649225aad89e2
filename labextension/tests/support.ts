import { ISlice } from '../src/contract';

/** English, as JupyterLab's translator puts numbers into words. */
export const trans = {
  __: (text: string, ...args: any[]): string => filled(text, args),
  _n: (one: string, many: string, n: number, ...args: any[]): string =>
    filled(n === 1 ? one : many, [n, ...args])
};

function filled(text: string, args: any[]): string {
  return text.replace(/%(\d)/g, (_, n) => String(args[Number(n) - 1]));
}

export const NOW = 1_000_000;

export function slice(changes: Partial<ISlice> = {}): ISlice {
  return {
    kernel_id: 'k',
    kernel_name: 'gpu-2',
    display_name: 'Python 3 (GPU 2%)',
    notebook: 'one.ipynb',
    state: 'held',
    size: '2%',
    pending_size: null,
    message: '',
    position: null,
    expected_wait: null,
    requested_at: NOW - 100,
    held_at: NOW - 90,
    ends_at: null,
    job: '',
    idle_since: null,
    idle_limit: null,
    gives_back_at: null,
    ends_when_idle: false,
    yields_at: null,
    kept_until: null,
    sleeps_at: null,
    asked_back: false,
    gives_way: false,
    asleep_since: null,
    image_mib: null,
    left_kernel: '',
    wake_error: '',
    wake_failed_at: null,
    devices: [{ name: 'V100', simulated: false }],
    node: '',
    memory: { granted_mib: 655, used_mib: 512, strength: 'none', by: 'accounting only' },
    compute: { share: '2%', strength: 'none', by: 'accounting only' },
    end_reason: null,
    end_message: '',
    given_back: false,
    actions: {},
    ...changes
  };
}

/** One that waits has nothing yet. */
export function waiting(changes: Partial<ISlice> = {}): ISlice {
  return slice({
    state: 'waiting',
    held_at: null,
    devices: [],
    memory: { granted_mib: 0, used_mib: null, strength: 'none', by: '' },
    compute: { share: '', strength: 'none', by: '' },
    position: 3,
    ...changes
  });
}
