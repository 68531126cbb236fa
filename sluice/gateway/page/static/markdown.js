// Markdown to DOM nodes. Text only ever becomes text nodes, so nothing that a model writes is parsed as HTML.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const DIVIDER = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?\s*)?$/;
const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|\*(\S(?:[^*]*?\S)?)\*|~~(\S(?:.*?\S)?)~~|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()"'`*]+[^\s<>()"'`*.,;:!?])/s;
const MAX_LEVELS = 20; // of quotes in quotes; deeper ones stay plain
const MAX_INLINE = 5_000; // characters of a block in which marks are looked for; a longer one stays plain

/** Splits a text into blocks: `{kind, lines, ...}`. A fence that is still open reaches to the end. */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  const take = (kind, fits, more = {}) => {
    const from = at++;
    while (at < lines.length && fits(lines[at])) at++;
    found.push({ kind, lines: lines.slice(from, at), ...more });
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at++;
    else if (fence) {
      const from = ++at;
      while (at < lines.length && !(lines[at].trimStart().startsWith(fence[1]) && FENCE.test(lines[at]))) at++;
      found.push({ kind: "code", lines: lines.slice(from, at++), language: fence[2] });
    } else if (HEADING.test(line)) take("heading", () => false);
    else if (RULE.test(line)) take("rule", () => false);
    else if (QUOTE.test(line)) take("quote", (next) => QUOTE.test(next));
    else if (ITEM.test(line)) take("list", (next) => ITEM.test(next) || /^\s{2,}\S/.test(next));
    else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) take("table", (next) => next.includes("|"));
    else take("paragraph", (next) => next.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((other) => other.test(next)));
  }
  return found;
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

/** Returns nodes for the marks within a block. */
function inline(text) {
  const nodes = [];
  let rest = text;
  let match;
  while (rest.length <= MAX_INLINE && (match = INLINE.exec(rest))) {
    const [whole, ticks, code, strong, emphasis, struck, label, target, bare] = match;
    if (match.index) nodes.push(rest.slice(0, match.index));
    if (ticks) nodes.push(element("code", code.length > 2 ? code.replace(/^ (.*) $/s, "$1") : code));
    else if (strong) nodes.push(element("strong", ...inline(strong)));
    else if (emphasis) nodes.push(element("em", ...inline(emphasis)));
    else if (struck) nodes.push(element("s", ...inline(struck)));
    else nodes.push(link(target ?? bare, label ?? bare));
    rest = rest.slice(match.index + whole.length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

function link(target, label) {
  const made = element("a", label);
  made.href = target; // begins with http:// or https://, by its pattern
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const made = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) made.start = parseInt(mark, 10);
  let item = [];
  const flush = () => {
    if (!item.length) return;
    const [first, ...inner] = item;
    const nested = inner.findIndex((line) => ITEM.test(line));
    const own = [first, ...(nested < 0 ? inner : inner.slice(0, nested))].map((line) => line.trim()).join("\n");
    made.append(element("li", ...inline(own), ...(nested < 0 ? [] : [list(inner.slice(nested))])));
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length) {
      flush();
      item = [found[3]];
    } else item.push(line);
  }
  flush();
  return made;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (tag, line) => element("tr", ...cells(line).map((cell) => element(tag, ...inline(cell))));
  const [head, , ...body] = lines;
  return element("table", element("thead", row("th", head)), element("tbody", ...body.map((line) => row("td", line))));
}

function node(block, level = 0) {
  const { kind, lines } = block;
  if (kind === "code") {
    const code = element("code", lines.join("\n"));
    if (block.language) code.dataset.language = block.language;
    return element("pre", code);
  }
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return element(`h${Math.min(marks.length + 1, 4)}`, ...inline(text));
  }
  if (kind === "rule") return element("hr");
  if (kind === "quote" && level < MAX_LEVELS) {
    const inner = blocks(lines.map((line) => QUOTE.exec(line)[1]).join("\n"));
    return element("blockquote", ...inner.map((each) => node(each, level + 1)));
  }
  if (kind === "list") return list(lines);
  if (kind === "table") return table(lines);
  return element("p", ...inline(lines.join("\n")));
}

/** Shows the text of a growing answer in an element; blocks that have not changed keep their nodes. */
export class Markdown {
  constructor(parent) {
    this.parent = parent;
    this.shown = [];
  }

  show(text) {
    const wanted = blocks(text);
    const keys = wanted.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && keys[same] === this.shown[same]) same++;
    while (this.parent.childNodes.length > same) this.parent.lastChild.remove();
    this.parent.append(...wanted.slice(same).map((block) => node(block)));
    this.shown = keys;
  }
}
