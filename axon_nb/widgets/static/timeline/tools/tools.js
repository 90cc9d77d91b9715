// @ts-check
// Features of a timeline that its page loads only when they are used.

import { create } from "../../shared/dom.js";
import { drawPicture } from "./picture.js";
import { Selection } from "./selection.js";
import { PipelineSteps } from "./steps.js";
import { chromeTrace } from "./trace.js";

/** @import { PictureParts } from "./picture.js" */
/** @import { SelectionView } from "./selection.js" */
/** @import { StepsView } from "./steps.js" */

/** @typedef {ReturnType<typeof makeTools>} Tools */

/**
 * @param {string} name
 * @param {Blob} blob
 */
function download(name, blob) {
  const link = create("a", "", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** @param {SelectionView & StepsView & {parts: PictureParts & {steps: HTMLElement}}} view */
export function makeTools(view) {
  const { store, config } = view;
  const steps = new PipelineSteps(view.parts.steps, config.paints, view);
  const saveTrace = () => {
    download("timeline.json", new Blob([JSON.stringify(chromeTrace(store, config))], { type: "application/json" }));
  };
  const savePicture = () => {
    drawPicture(view.parts, view).toBlob((blob) => blob && download("timeline.png", blob));
  };
  return { selection: new Selection(view), steps, saveTrace, savePicture };
}
