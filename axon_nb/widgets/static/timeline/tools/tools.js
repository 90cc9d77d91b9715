// @ts-check
// What a timeline needs only when it is used; its page loads this then.

import { create } from "../../shared/dom.js";
import { Selection } from "./selection.js";
import { PipelineSteps } from "./steps.js";
import { chromeTrace } from "./trace.js";

/** @import { SelectionView } from "./selection.js" */
/** @import { StepsView } from "./steps.js" */

/** @typedef {ReturnType<typeof makeTools>} Tools */

/** @param {SelectionView & StepsView & {parts: {steps: HTMLElement}}} view */
export function makeTools(view) {
  const { store, config } = view;
  const steps = new PipelineSteps(view.parts.steps, config.paints, view);
  const saveTrace = () => {
    const blob = new Blob([JSON.stringify(chromeTrace(store, config))], { type: "application/json" });
    const link = create("a", "", { href: URL.createObjectURL(blob), download: "timeline.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  return { selection: new Selection(view), steps, saveTrace };
}
