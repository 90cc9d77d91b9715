// Modules of axon_nb/widgets/static, joined as a page gets them: see axon_nb/widgets/assets.py.

import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const PYTHON = process.env.PYTHON ?? "python3";

/** A module and all that it imports, such as `strip/store`. A data: address makes it a module in each version of node. */
export function load(name) {
  const text = execFileSync(PYTHON, ["-m", "axon_nb.widgets.assets", name], { cwd: ROOT, encoding: "utf8" });
  return import(`data:text/javascript,${encodeURIComponent(text)}`);
}
