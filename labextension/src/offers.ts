/** What the launcher says of a kernel before it is started. Pure: values in, words out. */

import { IOffer, IOffers } from './contract';
import { place, Words } from './texts';

const MINUTE = 60;
const HOUR = 60 * MINUTE;
/** More than any slice has, so that memory only decides between slices of the same share. */
const MOST_MIB = 1e9;

/** "12 free now", "about 4 min"; empty where nothing is known. */
export function availability(offer: IOffer | undefined, trans: Words): string {
  if (!offer) {
    return '';
  }
  if (offer.message) {
    return trans.__('not available');
  }
  if (offer.free_now) {
    return trans._n('%1 free now', '%1 free now', offer.free_now);
  }
  if (offer.expected_wait) {
    return about(offer.expected_wait, trans);
  }
  if (offer.position !== null && offer.position > 1) {
    return place(offer.position, trans);
  }
  return offer.free_now === null ? '' : trans.__('none free now');
}

/** "about 4 min", "about 4 to 12 min", "about 2 hours". */
function about([soonest, latest]: [number, number], trans: Words): string {
  const inHours = latest > 2 * HOUR;
  const [from, to] = [soonest, latest].map(each =>
    Math.max(1, Math.round(each / (inHours ? HOUR : MINUTE)))
  );
  if (inHours) {
    return from === to
      ? trans._n('about %1 hour', 'about %1 hours', to)
      : trans.__('about %1 to %2 hours', from, to);
  }
  return from === to
    ? trans._n('about %1 min', 'about %1 min', to)
    : trans.__('about %1 to %2 min', from, to);
}

/** The whole of it, for a tooltip: the kernel, what is free, why not, and what is simulated. */
export function explanation(name: string, offer: IOffer | undefined, trans: Words): string {
  const told = [
    availability(offer, trans),
    offer?.message,
    offer?.simulated ? trans.__('The GPU is simulated.') : ''
  ];
  return [name, ...told].filter(Boolean).join('\n');
}

/**
 * The place of a kernel in its section: small slices before large ones.
 *
 * Before the pool has answered, by the size in its kernelspec, as far as that alone says how much it is.
 */
export function rank(offer: IOffer | undefined, size = ''): number {
  if (offer) {
    return offer.milli + (offer.memory_mib ?? 0) / MOST_MIB;
  }
  const [, count, number, percent] = /^(?:(\d+)x)?(\d+(?:\.\d+)?)(%?)(?:\.\.| |$)/.exec(size) ?? [];
  return number ? Number(count ?? 1) * Number(number) * (percent ? 10 : 1000) : Infinity;
}

/** Whether a launcher would show anything else. */
export function differ(one: IOffers | null, other: IOffers | null): boolean {
  return JSON.stringify(one) !== JSON.stringify(other);
}
