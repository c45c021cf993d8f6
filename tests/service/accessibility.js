// A few rules of WCAG 2.1 AA by hand: contrast of text, names of what can be used, one h1, headings in order,
// unique ids, names of what scrolls, no page wider than the window, targets that a finger hits.
() => {
  const found = [];
  const shown = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const name = (e) => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") + " " + (e.textContent || "").trim().slice(0, 40);
  const parse = (text) => { const n = text.match(/[\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255;
    return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = (e) => { let stack = []; for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c[3] > 0) stack.push(c); if (c[3] === 1) break; }
    return stack.reverse().reduce((under, c) => over(c, under), [255, 255, 255, 1]); };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const e = node.parentElement;
    if (!node.data.trim() || !shown(e) || e.closest("option, datalist, script, .away, .skip, button:disabled")) continue;
    const style = getComputedStyle(e), isDrawn = e.closest("svg") !== null;
    const ground = isDrawn && e.classList.contains("in-bar") ? null : behind(e);
    if (ground === null) continue;
    const ink = over(parse(isDrawn ? style.fill : style.color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`contrast ${ratio.toFixed(2)}: ${name(e)}`);
  }
  for (const e of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
    if (!e.labels?.length && !e.ariaLabel) found.push("no label: " + name(e));
    const edge = parse(getComputedStyle(e).borderTopColor), ground = behind(e.parentElement);
    const [a, b] = [light(over(edge, ground)), light(ground)].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 3) found.push("edge of a field is too faint: " + e.name);
  }
  for (const e of document.querySelectorAll("a, button, summary"))
    if (shown(e) && !(e.ariaLabel || e.textContent.trim())) found.push("no name: " + e.outerHTML.slice(0, 80));
  for (const e of document.querySelectorAll("svg"))
    if (!e.closest("[aria-hidden]") && !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")
      || e.querySelector("title"))) found.push("a drawing without a name");
  for (const e of document.querySelectorAll("[tabindex='0']"))
    if (!e.ariaLabel && !e.getAttribute("aria-labelledby") && !e.closest("a, button")) found.push("no name: " + e.outerHTML.slice(0, 80));
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of ids.filter((id, i) => ids.indexOf(id) !== i)) found.push("id twice: " + id);
  for (const e of document.querySelectorAll("[aria-labelledby], [aria-describedby], label[for]"))
    for (const id of (e.getAttribute("aria-labelledby") || e.getAttribute("aria-describedby") || e.htmlFor).split(" "))
      if (!document.getElementById(id)) found.push("points at nothing: " + id);
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
  let level = 1;
  for (const e of document.querySelectorAll("h1, h2, h3, h4")) {
    const now = Number(e.tagName[1]);
    if (now > level + 1) found.push("a heading level is left out before: " + name(e));
    level = now;
  }
  if (!document.documentElement.lang) found.push("no language");
  if (!document.title) found.push("no title");
  if (!document.querySelector("main")) found.push("no main");
  for (const e of document.querySelectorAll("th")) if (!e.scope) found.push("a head without scope: " + name(e));
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 0) found.push(`the page is ${wide} pixels wider than the window`);
  for (const e of document.querySelectorAll("button, nav a, summary")) {
    const box = e.getBoundingClientRect();
    if (shown(e) && !e.closest(".skip, .away") && !e.matches(".skip") && box.height < 24) found.push(`only ${box.height} pixels high: ` + name(e));
  }
  return [...new Set(found)];
}
