// Markdown to DOM nodes. Text only ever becomes text nodes, so nothing that a model writes is parsed as HTML.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const DIVIDER = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?\s*)?$/;
const MATH = /^ {0,3}(\$\$|\\\[)(?!.*(\$\$|\\\]).*[^\s.,;])/; // a formula of its own, of any number of lines
const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|(\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|\$(?![\s$])[^$`\n]*?[^$`\s]\$(?!\d))|\*\*(\S(?:.*?\S)?)\*\*|\*(\S(?:[^*]*?\S)?)\*|~~(\S(?:.*?\S)?)~~|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()"'`*]+[^\s<>()"'`*.,;:!?])/s;
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
    } else if (MATH.test(line)) {
      const end = MATH.exec(line)[1] === "$$" ? "$$" : "\\]";
      const from = at;
      let rest = line.trimStart().slice(2);
      while (!rest.includes(end) && ++at < lines.length && lines[at].trim()) rest = lines[at];
      if (rest.includes(end)) at++;
      found.push({ kind: "math", lines: lines.slice(from, at) });
    } else if (HEADING.test(line)) take("heading", () => false);
    else if (RULE.test(line)) take("rule", () => false);
    else if (QUOTE.test(line)) take("quote", (next) => QUOTE.test(next));
    else if (ITEM.test(line)) take("list", (next) => ITEM.test(next) || /^\s{2,}\S/.test(next));
    else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) take("table", (next) => next.includes("|"));
    else take("paragraph", (next) => next.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM, MATH].some((other) => other.test(next)));
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
    const [whole, ticks, code, formula, strong, emphasis, struck, label, target, bare] = match;
    if (match.index) nodes.push(rest.slice(0, match.index));
    if (ticks) nodes.push(element("code", code.length > 2 ? code.replace(/^ (.*) $/s, "$1") : code));
    else if (formula) nodes.push(math("span", formula));
    else if (strong) nodes.push(element("strong", ...inline(strong)));
    else if (emphasis) nodes.push(element("em", ...inline(emphasis)));
    else if (struck) nodes.push(element("s", ...inline(struck)));
    else nodes.push(link(target ?? bare, label ?? bare));
    rest = rest.slice(match.index + whole.length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

/** Returns a formula as the text that it is, marked: without marks for emphasis in it. */
function math(tag, text) {
  const made = element(tag, text);
  made.className = "math";
  made.title = "A formula, in TeX";
  return made;
}

/** Returns a button that copies a text. Its label is no text of the page, so that it is not selected with the answer. */
export function copyButton(label, text) {
  const made = element("button");
  made.type = "button";
  made.className = "copy";
  made.setAttribute("aria-label", label);
  made.onclick = async () => {
    made.dataset.done = (await copied(text())) ? "Copied" : "Not copied";
    made.setAttribute("aria-label", made.dataset.done);
    setTimeout(() => { delete made.dataset.done; made.setAttribute("aria-label", label); }, 2_000);
  };
  return made;
}

/** Copies a text. Returns true if the browser did. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* browsers offer it to secure pages alone: not over HTTP from another machine */ }
  const box = element("textarea");
  box.value = text;
  box.className = "hidden";
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

/** Returns an element that scrolls sideways, with a keyboard too. */
function scrolling(made, className = "") {
  made.tabIndex = 0;
  made.className = className;
  return made;
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
  const made = element("table", element("thead", row("th", head)), element("tbody", ...body.map((line) => row("td", line))));
  return scrolling(element("div", made), "wide");
}

function node(block, level = 0) {
  const { kind, lines } = block;
  if (kind === "code") {
    const code = element("code", lines.join("\n"));
    if (block.language) code.dataset.language = block.language;
    const made = element("div", scrolling(element("pre", code)), copyButton("Copy the code", () => lines.join("\n")));
    made.className = "code";
    return made;
  }
  if (kind === "math") return math("p", lines.join("\n"));
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
