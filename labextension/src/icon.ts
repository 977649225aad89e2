import { LabIcon } from '@jupyterlab/ui-components';

/** A graphics card with its fan. */
const CARD = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <path d="M2 3h2v18H2z"/>
    <path fill-rule="evenodd" d="M5 5h17v11H5zM7 7v7h13V7z"/>
    <path fill-rule="evenodd" d="M13.5 7.5a3 3 0 1 1 0 6 3 3 0 0 1 0-6zm0 2a1 1 0 1 0 0 2 1 1 0 0 0 0-2z"/>
    <path d="M7 17h8v2H7z"/>
  </g>
</svg>`;

export const gpuIcon = new LabIcon({ name: 'jupyter-gpu-pool:gpu', svgstr: CARD });
