(function () {
  var root = document.documentElement;
  var store = { get: function () { return null; }, set: function () {} };
  try {
    var kept = window.localStorage;
    store = {
      get: function () { return kept.getItem("fat5-theme"); },
      set: function (theme) { kept.setItem("fat5-theme", theme); }
    };
  } catch (refused) { /* a page from a file may have no storage */ }
  var chosen = store.get();
  if (chosen === "dark" || chosen === "light") { root.dataset.theme = chosen; }
  document.getElementById("theme").addEventListener("click", function () {
    var asked = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    var now = root.dataset.theme || asked;
    root.dataset.theme = now === "dark" ? "light" : "dark";
    store.set(root.dataset.theme);
  });
})();
