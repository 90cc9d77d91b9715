// A view's script as the page gets it: see axon_nb/widgets/assets.py.

import { readFileSync } from "node:fs";

const STATIC = new URL("../../axon_nb/widgets/static/", import.meta.url);

function whole(name, known) {
  const text = readFileSync(new URL(`${name}.js`, STATIC), "utf8");
  return text.replace(/^import \{[^}]*\} from "\.\/(\w+)\.js";\n/gm, (_, imported) => {
    if (known.has(imported)) return "";
    known.add(imported);
    return whole(imported, known).replace(/^export (?=function|const)/gm, "");
  });
}

/** The module; as a data: address it is one whatever the file's extension says to this version of node. */
export function load(name) {
  return import(`data:text/javascript,${encodeURIComponent(whole(name, new Set()))}`);
}
