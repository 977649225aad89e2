/** What the stream needs of a WebSocket. */
export interface ISocket {
  onmessage: ((event: { data: any }) => void) | null;
  onclose: (() => void) | null;
  close(): void;
}

/** Milliseconds until the next attempt: longer each time, and not for all pages at once. */
export function backOff(failures: number, random: number = Math.random()): number {
  const longest = Math.min(60_000, 1000 * 2 ** Math.min(failures, 10));
  return longest * (0.5 + random / 2);
}

/**
 * A socket that is opened again whenever it closes.
 *
 * `later` calls a function after some milliseconds and returns what cancels that.
 */
export class Stream {
  constructor(
    private readonly open: () => ISocket,
    private readonly heard: (data: string) => void,
    private readonly closed: () => void,
    private readonly later: (call: () => void, ms: number) => () => void = setLater
  ) {}

  start(): void {
    if (this.socket || this.cancel) {
      return;
    }
    const socket = (this.socket = this.open());
    socket.onmessage = event => {
      this.failures = 0;
      this.heard(event.data);
    };
    socket.onclose = () => {
      this.socket = null;
      this.cancel = this.later(() => {
        this.cancel = null;
        this.start();
      }, backOff(this.failures++));
      this.closed();
    };
  }

  stop(): void {
    this.cancel?.();
    this.cancel = null;
    if (this.socket) {
      this.socket.onmessage = this.socket.onclose = null;
      this.socket.close();
      this.socket = null;
    }
    this.failures = 0;
  }

  private socket: ISocket | null = null;
  private cancel: (() => void) | null = null;
  private failures = 0;
}

function setLater(call: () => void, ms: number): () => void {
  const timer = setTimeout(call, ms);
  return () => clearTimeout(timer);
}
