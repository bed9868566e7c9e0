"""The style of the pages, after those of reports."""

from oncely.audit import page as audit_page

STYLE = (
    audit_page.STYLE
    + """
.warn .dot { --dot: var(--twice); } .bad .dot { --dot: var(--lost); }
.fine .dot { --dot: var(--fine); } .busy .dot { --dot: var(--other); }
.unknown .dot { --dot: var(--unsure); }
.top { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; align-items: center;
  font-size: .875rem; color: var(--soft); margin-bottom: 1.5rem; }
.top > :first-child { margin-right: auto; }
.top form { margin: 0; }
a { color: rgb(var(--other)); text-underline-offset: .15em; }
a:focus-visible, button:focus-visible, input:focus-visible, select:focus-visible {
  outline: 2px solid rgb(var(--other)); outline-offset: 2px; }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; top: .5rem; }
.said { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.pipelines p { margin: 0; } .pipelines tbody th { min-width: 11rem; font-weight: 400; }
.states { display: flex; flex-wrap: wrap; gap: .4rem 1rem; margin: 1rem 0; }
[aria-current] { color: var(--ink); font-weight: 700; text-decoration: none; }
.line { height: 5rem; background: var(--card); margin-top: .5rem; overflow: visible; }
.line path { fill: none; stroke: rgb(var(--other)); stroke-width: 2;
  vector-effect: non-scaling-stroke; }
.plot > span { line-height: 1.4; } @media (min-width: 34rem) { .number-of { display: none; } }
.verdict { display: flex; gap: .6rem; align-items: baseline; color: var(--ink); }
.dot { flex: none; width: .7rem; height: .7rem; border-radius: 50%; background: rgb(var(--dot)); }
.dot { position: relative; top: .05rem; }
.bad .dot { border-radius: 2px; } .warn .dot { border-radius: 2px; transform: rotate(45deg); }
h1 { display: block; }
.scroll + p, .scroll + form.ask, details + p, details + form.ask { margin-top: 1rem; }
.way-out { font-size: .9375rem; }
.problem { border-left: 3px solid rgb(var(--lost)); padding: .1rem 0 .1rem .9rem; }
.lanes-of { list-style: none; padding: 0; margin: 0; }
.lanes-of li { padding: .6rem 0; border-top: 1px solid var(--rule); }
.lanes-of svg { height: 1.2rem; margin: .35rem 0; border-radius: 4px; }
.lanes-of small { color: var(--soft); font-variant-numeric: tabular-nums; }
.e0 { --colour: rgba(var(--fine), .7); } .e1 { --colour: rgba(var(--other), .6); }
.e2 { --colour: rgba(var(--twice), .7); } .hole { --colour: rgba(var(--unsure), .5); }
.gap { --colour: rgb(var(--lost)); } .undone { --colour: rgb(var(--unsure)); }
.change { --colour: var(--ink); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .8125rem/1.5 ui-monospace,
  "SF Mono", Consolas, monospace; }
td time { white-space: nowrap; }
.letter { margin: .25rem 0 1rem; padding-left: 1rem; border-left: 3px solid var(--rule); }
.letter p { margin: 0; font-size: .9375rem; }
.letter dl { margin: .25rem 0 0; }
.letter dl div { display: grid; grid-template-columns: minmax(4rem, 8rem) 1fr; gap: 0 .75rem; }
.letter dt { color: var(--soft); font-size: .8125rem; overflow-wrap: anywhere; }
.letter dd { margin: 0; min-width: 0; }
details { border-top: 1px solid var(--rule); }
details > summary { color: var(--ink); overflow-wrap: anywhere; }
summary small { color: var(--soft); }
form.ask { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: end;
  margin: .5rem 0 1rem; }
form.ask label { display: grid; gap: .15rem; font-size: .875rem; color: var(--soft); }
input, select, button { font: inherit; color: var(--ink); background: var(--card);
  border: 1px solid var(--soft); border-radius: 6px; padding: .4rem .6rem; min-height: 2.75rem;
  max-width: 100%; }
button { cursor: pointer; font-weight: 600; }
button.change-it { background: rgb(var(--other)); border-color: transparent; color: var(--page); }
.top button { min-height: 0; padding: .1rem .5rem; font-weight: 400; }
@media (max-width: 34rem) { .lanes-of svg { height: 1.4rem; }
  .pipelines tr { display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .5rem 0;
    border-bottom: 1px solid var(--rule); } .pipelines tr > * { border: 0; padding: .1rem 0; }
  .pipelines tbody tr > :nth-child(-n + 2) { flex: 0 0 100%; } }
"""
)

SCRIPT = """\
// Replaces the live part of the page when the server has read something else.
const live = document.getElementById("live");
const said = document.getElementById("said");
const verdict = () => live.querySelector(".verdict")?.textContent.trim();
const name = (one) => one.id || one.getAttribute("href") || one.getAttribute("aria-label")
  || one.parentElement.id;
const tables = () => [...live.querySelectorAll(".scroll")];
const busy = () => live.contains(document.activeElement) && document.activeElement.matches("input");
const search = document.getElementById("search");
let asked = 0;
async function renew() {
  if (busy() || !getSelection().isCollapsed) return;
  const own = ++asked;
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!answer.ok || answer.redirected || own !== asked) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (!fresh) return;
  for (const one of live.querySelectorAll("details[open][id]"))
    fresh.querySelector("#" + CSS.escape(one.id))?.setAttribute("open", "");
  const before = verdict(), at = document.activeElement, focused = live.contains(at) && name(at);
  const scrolled = new Map(tables().map((one) => [name(one), one.scrollLeft]));
  live.replaceChildren(...fresh.childNodes);
  const stops = [...live.querySelectorAll("a, button, summary, .scroll")];
  if (focused) stops.find((one) => name(one) === focused)?.focus({ preventScroll: true });
  for (const one of tables()) one.scrollLeft = scrolled.get(name(one)) ?? 0;
  if (verdict() !== before) said.textContent = verdict() ?? "";
}
search?.addEventListener("input", () => {
  history.replaceState(null, "", "/?" + new URLSearchParams(new FormData(search)));
  renew();
});
const events = new EventSource(live.dataset.events);
events.addEventListener("changed", renew);
events.onopen = () => { document.documentElement.dataset.live = "yes"; };
events.onerror = () => { document.documentElement.dataset.live = "no"; };
"""
