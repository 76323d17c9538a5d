#!/usr/bin/env bash
# notes.sh [NOTE...]: how the notes are written. A line has at most 100 columns, a sentence outside of tables
# and code at most 30 words, a link to a file of the project leads somewhere, and each number with a unit says
# where it is from (tests/questions.py), and what a note asks of its reader is true (tests/reading.py). Prints
# each violation; the last line is "N passed, N failed", of notes.
set -uo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
notes=("$@")
[ $# -gt 0 ] || notes=(README.md .github/*.md 0*/*.md 0*/*/*.md common/*.md common/*/README.md common/*/*/README.md tests/*.md tests/homework/*.md)
passed=0 failed=0

for note in "${notes[@]}"; do
  violations=$(
    awk -v note="$note" '
    function report(line, what) { print note ":" line ": " what }
    # Words of one sentence.
    function judge(sentence,  words) {
      words = split(sentence, unused, /[ \t]+/)
      if (words > 30) report(first, words " words: " substr(sentence, 1, 70) "...")
    }
    # The text since line `first`: code, formulas and abbreviations are no ends of sentences.
    function end_of_text(  at) {
      gsub(/`[^`]*`/, "code", text)
      gsub(/\]\([^)]*\)/, "", text); gsub(/\[/, "", text)
      gsub(/e\.g\./, "eg", text); gsub(/i\.e\./, "ie", text); gsub(/et al\./, "et al", text)
      gsub(/(Fig|Sec|Eq|vs|No)\./, "abbreviation", text)
      gsub(/^[ \t]+|[ \t]+$/, "", text)
      while (match(text, /[.!?][)*_"]*[ \t]+/)) {
        judge(substr(text, 1, RSTART)); text = substr(text, RSTART + RLENGTH)
      }
      if (text != "") judge(text)
      text = ""
    }
    /!\[\]\(/ { report(NR, "a picture without a sentence") }
    { columns = $0; gsub(/[\200-\277]|<img [^>]*>|\$/, "", columns)  # bytes that continue a character; pictures; formulas
      if (length(columns) > 100) report(NR, length(columns) " columns") }
    # Questions, whose answers fold out, end a section (tests/questions.py). GitHub wants empty lines around
    # an answer.
    /^#/ { marked = over = 0 }
    /^\*\*Ask yourself\*\*$/ { marked = 1 }
    /^<details>/ { questions += 1; over = 0; if (note ~ /^0/ && !marked) report(NR, "not below **Ask yourself**") }
    over && !/^$/ { report(NR, "stands after the questions of a section"); over = 0 }
    /^<\/details>/ { over = 1 }
    /<\/summary>$/ { answer = NR + 1 }
    NR == answer && !/^$/ || /^<\/details>/ && before != "" { report(NR, "an empty line is missing") }
    { before = $0 }
    /^<!-- numbers$/ { end_of_text(); in_numbers = 1 }
    in_numbers { if (/-->$/) in_numbers = 0; next }
    /^<!-- (figure|run) / { end_of_text(); in_figure = 1 }
    in_figure {  # commands, then a sentence, which the book shows
      first = NR
      if (/-->$/) { in_figure = 0; sub(/ *-->$/, ""); text = text " " $0; end_of_text() }
      else if (/^<!--|\$ |\\$/ || was_cut) was_cut = /\\$/
      else text = text " " $0
      next
    }
    /^ *```/ { end_of_text(); in_code = !in_code; next }
    in_code || /^ *\|/ || /^#/ || /^ *$/ { end_of_text(); next }
    /^    / && text == "" { next }                                           # code, indented
    /^<\/?details>/ { end_of_text(); next }
    { gsub(/<\/?(summary|code)>/, "") }
    /^ *([-*]|[0-9]+\.) / { end_of_text(); sub(/^ *([-*]|[0-9]+\.) +/, "") }  # an item of a list
    { if (text == "") first = NR; text = text " " $0 }
    END { end_of_text()
          if (note ~ /^0[1-7]_[^\/]*\/README/ && (questions < 8 || questions > 12)) report(NR, questions + 0 " questions, not 8 to 12") }' "$note"
    while IFS=: read -r line target; do
      path=${target%%#*}
      [ -z "$path" ] || [ -e "$(dirname "$note")/$path" ] || echo "$note:$line: no file $path"
    done < <(grep -noE '(\]\(|src=")[^)" ]+' "$note" | sed -E 's/\]\(|src="//' | grep -vE ':(https?|mailto):|^[0-9]+:\.\./\.\./actions')
  )
  violations+=$(
    python3 tests/questions.py --lacking "$note"
    python3 tests/reading.py "$note"
  )
  if [ -z "$violations" ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "$violations"
  fi
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
