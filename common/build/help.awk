# make help: a line for what most people make, below five headings, then the names of the rest. With `word`: all
# lines that have it, whole; all: each line. A line of help is behind ##, or behind #: where only its name is listed.
/^# ---- (Learn|Train|Look|Teach|Change) / { group = $3 }
/^[a-z][-a-z0-9%]*:.* #[#:] / {
  name = $1
  sub(/:.*/, "", name)
  sub(/%/, "03", name)
  text = $0
  is_main = sub(/.* ## /, "", text)
  sub(/.* #: /, "", text)
  if (word != "") {
    if (word == "all" || index(name " " text, word)) print "make " name "  " text
  } else if (is_main) {
    sub(/[:;]?  .*/, "", text) # what it takes
    printf "%-7s make %-10s %s\n", group == shown ? "" : group, name, text
    shown = group
  } else {
    rest = rest " " name
  }
}
END {
  if (word == "") print "also" rest "\n\nmake help W=tests: all lines with this word, and with what they take" | "fold -s -w 80"
}
