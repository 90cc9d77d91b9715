// Prints the functions of modules as [file, name, first line, number of lines], found by TypeScript's parser.

import { readFileSync } from "node:fs";

import ts from "typescript";

const found = [];
for (const file of process.argv.slice(2)) {
  const source = ts.createSourceFile(file, readFileSync(file, "utf8"), ts.ScriptTarget.Latest, true, ts.ScriptKind.JS);
  const lineOf = (position) => source.getLineAndCharacterOfPosition(position).line + 1;
  const visit = (node) => {
    if (ts.isFunctionLike(node) && node.body) {
      const own = ts.isConstructorDeclaration(node) ? "constructor" : (node.name ?? node.parent.name)?.getText();
      const first = lineOf(node.getStart());
      found.push([file, own ?? "(anonymous)", first, lineOf(node.getEnd()) - first + 1]);
    }
    ts.forEachChild(node, visit);
  };
  visit(source);
}
console.log(JSON.stringify(found));
