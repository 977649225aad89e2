import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

const ROOT = 'gpu-pool/api';

/** The server extension said no, in words for the person. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly advice: string
  ) {
    super(message);
  }
}

/** An answer, and when the server gave it, in Unix seconds (NaN if it does not say). */
export interface IAnswer<T> {
  body: T;
  at: number;
}

/**
 * Ask the server extension.
 *
 * @throws ApiError for every answer that is none, and where there is no server extension (404).
 */
export async function ask<T>(
  settings: ServerConnection.ISettings,
  path: string,
  body?: object
): Promise<IAnswer<T>> {
  const url = URLExt.join(settings.baseUrl, ROOT, path);
  const init: RequestInit =
    body === undefined ? { method: 'GET' } : { method: 'POST', body: JSON.stringify(body) };
  const response = await ServerConnection.makeRequest(url, init, settings);
  const text = await response.text();
  const answer = parsed(text);
  if (!response.ok) {
    throw new ApiError(
      response.status,
      answer?.message ?? `${response.status} ${response.statusText}`,
      answer?.advice ?? ''
    );
  }
  return { body: answer as T, at: Date.parse(response.headers.get('Date') ?? '') / 1000 };
}

/** Open the stream of states. */
export function openEvents(settings: ServerConnection.ISettings): WebSocket {
  let url = URLExt.join(settings.wsUrl, ROOT, 'events');
  if (settings.appendToken && settings.token) {
    url += `?token=${encodeURIComponent(settings.token)}`;
  }
  return new settings.WebSocket(url);
}

export function kernelPath(kernelId: string, action: string): string {
  return `slices/${encodeURIComponent(kernelId)}/${action}`;
}

function parsed(text: string): any {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
