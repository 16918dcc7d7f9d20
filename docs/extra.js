// The theme gives each block of code a landmark without a name, and a keyboard cannot scroll a wide block.
const improve = () => {
  document.querySelectorAll(".md-code__nav").forEach((nav, index) => {
    nav.setAttribute("aria-label", `Code ${index + 1}`)
  })
  document.querySelectorAll("pre > code").forEach((code) => {
    code.tabIndex = 0
  })
}
improve()
new MutationObserver(improve).observe(document.documentElement, { childList: true, subtree: true })
