// Adds the button, so that a page without scripts has none.
const code = document.querySelector("#export code"), button = document.createElement("button");
button.textContent = "Copy";
button.onclick = async () => {
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(code); button.textContent = "Selected: press Ctrl-C"; }
};
code.parentElement.after(button);
