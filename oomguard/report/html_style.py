"""The look of a report in HTML: every rule begins with ``.oomguard``, so that a notebook keeps its own look."""

from __future__ import annotations

from typing import Final

# For the page and the notebook: the colours suit any background.
STYLE: Final = """
.oomguard{--line:rgba(128,128,128,.35);--soft:rgba(128,128,128,.12);--dim:.72;--good:#1f7a44;--bad:#b3261e;
line-height:1.5;overflow-wrap:anywhere}
.oomguard *{box-sizing:border-box}
.oomguard section{border:1px solid var(--line);border-left:4px solid var(--bad);border-radius:8px;
padding:1rem 1.25rem;margin:1rem 0}
.oomguard section.start,.oomguard section.attempts{border-left-color:var(--good)}
.oomguard section.quiet{border-left-color:var(--line)}
.oomguard .headline{font-size:1.25em;font-weight:650;line-height:1.3;margin:0 0 .25rem}
.oomguard .title{font-size:1.02em;font-weight:650;margin:1.25rem 0 .35rem}
.oomguard p{margin:.35rem 0}
.oomguard .dim{opacity:var(--dim);font-size:.92em}
.oomguard .bar{display:flex;height:1.75rem;border-radius:5px;overflow:hidden;background:var(--soft);margin:1rem 0 .5rem;gap:1px}
.oomguard .bar span{min-width:3px;background:var(--light)}
.oomguard .swatch{display:inline-block;width:.8em;height:.8em;border-radius:3px;background:var(--light);margin-right:.5em}
.oomguard table{border-collapse:collapse;font-size:.95em;margin:0;width:auto;border:0;text-align:left}
.oomguard th,.oomguard td{padding:.15rem 1rem .15rem 0;text-align:left;vertical-align:top;border:0;background:none;
white-space:pre-line}
.oomguard th{font-weight:600}
.oomguard td.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.oomguard .legend td{overflow-wrap:normal}
.oomguard .wide{overflow-x:auto}
.oomguard .attempts table{min-width:34rem}
.oomguard .attempts td:last-child{white-space:nowrap}
.oomguard .attempts th,.oomguard .attempts td{border-bottom:1px solid var(--line);padding:.35rem 1rem .35rem 0;overflow-wrap:normal}
.oomguard pre,.oomguard code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em}
.oomguard pre{background:var(--soft);color:inherit;border:0;border-radius:6px;padding:.6rem .75rem;margin:.5rem 0;
white-space:pre-wrap;overflow-wrap:anywhere}
.oomguard ol,.oomguard ul{padding-left:1.4rem;margin:.25rem 0}
.oomguard li{margin:.6rem 0}
.oomguard .paste{display:flex;gap:.5rem;align-items:flex-start;margin:.35rem 0}
.oomguard .paste code{flex:1;background:var(--soft);color:inherit;border-radius:6px;padding:.4rem .65rem;
user-select:all;white-space:pre-wrap}
.oomguard .tag{display:inline-block;border:1px solid var(--line);border-radius:999px;padding:0 .6em;font-size:.82em;white-space:nowrap}
.oomguard summary{cursor:pointer;margin-top:.9rem}
"""
DARK: Final = """
@media (prefers-color-scheme:dark){.oomguard{--good:#53c785;--bad:#f0796f}
.oomguard .bar span,.oomguard .swatch{background:var(--dark)}}
"""
PAGE_STYLE: Final = """
:root{color-scheme:light dark}
body{margin:0;background:#fff;color:#1c1f24;font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:56rem;margin:0 auto;padding:1.5rem 1.25rem 3rem}
h1{font-size:1.05rem;font-weight:600;margin:0;opacity:.75}
.oomguard button{font:inherit;font-size:.82em;padding:.35rem .7rem;border:1px solid var(--line);border-radius:6px;
background:none;color:inherit;cursor:pointer}
@media (prefers-color-scheme:dark){body{background:#14171c;color:#e4e7ec}}
@media (max-width:34rem){.oomguard .legend td:last-child{display:none}
main{padding:.75rem .6rem 2rem}.oomguard section{padding:.75rem .8rem}}
@media print{.oomguard button{display:none}.oomguard section{break-inside:avoid-page}}
"""
# Adds the copy buttons, so that a page without scripts has none that do nothing.
SCRIPT: Final = """
for (const code of document.querySelectorAll(".paste code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", () => navigator.clipboard.writeText(code.textContent).then(() => {
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }));
  if (navigator.clipboard) code.parentNode.append(button);
}
"""
