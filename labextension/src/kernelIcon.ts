import { LabIcon } from '@jupyterlab/ui-components';

import { gpuIcon } from './icon';

/**
 * A kernel's own logo on its card in the launcher, and the chip at the head of its section, which has the
 * icon of its first card.
 */
export function kernelIcon(kernel: string, logo: string): LabIcon {
  const image = document.createElementNS('http://www.w3.org/2000/svg', 'image');
  image.setAttribute('href', logo);
  image.setAttribute('width', '24');
  image.setAttribute('height', '24');
  image.setAttribute('class', 'jp-GpuSlice-logo');
  const drawn = new XMLSerializer().serializeToString(image);
  return new LabIcon({
    name: `jupyter-gpu-pool:kernel-${kernel}`,
    svgstr: gpuIcon.svgstr.replace('</svg>', `${drawn}</svg>`)
  });
}
