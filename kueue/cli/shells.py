"""The completion script of each shell: it passes the line to ``kueue`` and shows what comes back.

Rules
- Only ``kueue`` need be found: by the name or path that was typed, or beside the program that was typed, or on PATH.
- A start-up file that evaluates the script meets no error, in whatever state the shell is.
- The scripts keep the words of a person's line out of every evaluation.
"""

from __future__ import annotations

from kueue.cli.completion import COMMAND_EXIT_CODE, FILES_EXIT_CODE
from kueue.cli.programs import PROGRAMS

FILES = {
    "bash": "kueue.bash",
    "zsh": "_kueue",
    "fish": "kueue.fish",
    "tcsh": "kueue.tcsh",
    "powershell": "kueue.ps1",
    "elvish": "kueue.elv",
}
"""Shell to the name of the file with its script in the folder ``completions``."""

_ALL = ("kueue", *PROGRAMS)


def script(shell: str) -> str:
    """The text of the script, which ends with a line end."""
    text = _SCRIPTS[shell]
    for mark, value in (
        ("@FILES@", str(FILES_EXIT_CODE)),
        ("@COMMAND@", str(COMMAND_EXIT_CODE)),
        ("@PROGRAMS@", " ".join(_ALL)),
        ("@QUOTED@", ", ".join(f"'{name}'" for name in _ALL)),
    ):
        text = text.replace(mark, value)
    if shell == "tcsh":
        return "".join(text.replace("@PROGRAM@", name) for name in _ALL)
    return text


_BASH = r"""# Completion of kueue for bash. In ~/.bashrc: eval "$(kueue complete bash)"
_kueue() {
    local program=${1//\\/} answer code
    [[ $program == "~/"* ]] && program=$HOME/${program:2}
    case $program in
        */kueue) ;;
        */kueue_*) program=${program%/*}/kueue ;;
        *) program=kueue ;;
    esac
    command -v -- "$program" > /dev/null 2>&1 || program=kueue
    COMPREPLY=()
    answer=$(
        export COMP_LINE COMP_POINT _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=bash _ARGCOMPLETE_IFS=$'\n' _KUEUE_NATIVE=1
        export _ARGCOMPLETE_COMP_WORDBREAKS=$COMP_WORDBREAKS
        command -- "$program" 8>&1 < /dev/null > /dev/null 2>&1
    )
    code=$?
    if ((code == @FILES@)); then
        compopt -o default 2> /dev/null
    elif ((code == @COMMAND@)); then
        _kueue_command "$answer"
    elif ((code == 0)) && [[ -n $answer ]]; then
        mapfile -t COMPREPLY <<< "$answer"
        compopt -o nosort 2> /dev/null
        [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2> /dev/null
    fi
    return 0
}

# The command that kueue is to run begins behind so many words.
_kueue_command() {
    local rest=$COMP_LINE gap index count=-1
    for ((index = 0; index < COMP_CWORD; index++)); do
        gap=${rest%%[![:space:]]*}
        rest=${rest#"$gap"}
        # Bash also cuts words at signs like = and :, a blank alone begins a new one.
        [[ $index == 0 || -n $gap ]] && ((++count))
        ((count >= $1)) && break
        rest=${rest#"${COMP_WORDS[index]}"}
    done
    if declare -F _command_offset > /dev/null; then
        _command_offset "$index"
    elif ((index == COMP_CWORD)) && [[ ${COMP_WORDS[COMP_CWORD]} != */* ]]; then
        mapfile -t COMPREPLY < <(compgen -c -- "${COMP_WORDS[COMP_CWORD]}" | sort -u)
        [[ -n ${COMPREPLY[0]-} ]] || compopt -o default 2> /dev/null
    else
        compopt -o default 2> /dev/null
    fi
}

complete -F _kueue @PROGRAMS@
"""

_ZSH = r"""#compdef @PROGRAMS@
# Completion of kueue for zsh. In ~/.zshrc: eval "$(kueue complete zsh)"; or as a file _kueue in a folder of $fpath.
_kueue() {
    local program=${(Q)words[1]} answer line
    local -i code
    local -a plain open
    program=${program/#\~\//$HOME/}
    case $program in
        (*/kueue) ;;
        (*/kueue_*) program=${program:h}/kueue ;;
        (*) program=kueue ;;
    esac
    [[ $program == kueue || -x $program ]] || program=kueue
    line="${(j: :)words[1,CURRENT-1]} $IPREFIX$QIPREFIX$PREFIX"
    answer=$(
        export COMP_LINE=$line COMP_POINT=${#line} _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=zsh _ARGCOMPLETE_IFS=$'\n'
        export _KUEUE_NATIVE=1
        command -- $program 8>&1 < /dev/null > /dev/null 2>&1
    )
    code=$?
    if (( code == @FILES@ )); then
        [[ $PREFIX == -*=* ]] && compset -P 1 '*='
        _files
    elif (( code == @COMMAND@ )) && [[ $answer == <-> ]]; then
        words[1,answer]=()
        (( CURRENT -= answer ))
        _normal
    elif (( code == 0 )) && [[ -n $answer ]]; then
        plain=("${(@f)answer}")
        open=("${(@M)plain:#(*[^\\]|)[=/](|:*)}")
        plain=("${(@)plain:|open}")
        _describe -V kueue plain -- open -S ''
    else
        return 1
    fi
}

# Another line of the start-up file may set up completion later, which forgets all that was said before; so this is
# said again at the first prompt. Where nothing has set it up by then, it is done here.
_kueue_register() {
    precmd_functions=("${(@)precmd_functions:#_kueue_register}")
    if (( ! ${+functions[compdef]} )); then
        autoload -Uz compinit && compinit -i 2> /dev/null
    fi
    (( ${+functions[compdef]} )) && compdef _kueue @PROGRAMS@
    return 0
}

if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then
    _kueue "$@"
else
    (( ${+functions[compdef]} )) && compdef _kueue @PROGRAMS@
    typeset -ga precmd_functions
    precmd_functions+=(_kueue_register)
fi
"""

_FISH = r"""# Completion of kueue for fish. In ~/.config/fish/config.fish: kueue complete fish | source
function __kueue_complete
    set -l words (commandline -opc)
    set -l program (string replace -r '^~/' "$HOME/" -- $words[1])
    switch $program
        case '*/kueue'
        case '*/kueue_*'
            set program (string replace -r '[^/]*$' kueue -- $program)
        case '*'
            set program kueue
    end
    command -sq -- $program; or set program kueue
    set -l line (commandline -cp | string collect)
    set -l answer
    set -l code
    begin
        # In a block of their own: what completes files and other commands below must not see them.
        set -lx COMP_LINE $line
        set -lx COMP_POINT (string length -- "$line")
        set -lx _ARGCOMPLETE 1
        set -lx _ARGCOMPLETE_SHELL fish
        set -lx _ARGCOMPLETE_IFS \n
        set -lx _ARGCOMPLETE_DFS \t
        set -lx _KUEUE_NATIVE 1
        set answer (command $program 8>&1 </dev/null >/dev/null 2>/dev/null)
        set code $status
    end
    switch $code
        case @FILES@
            set -l token (commandline -ct)
            if string match -q -- '-*=*' $token
                set -l parts (string split -m 1 = -- $token)
                for found in (__fish_complete_path $parts[2])
                    echo $parts[1]=$found
                end
            else
                __fish_complete_path $token
            end
        case @COMMAND@
            set -l rest (string escape -- $words[(math $answer + 1)..-1])
            complete -C (string join ' ' -- $rest (commandline -ct) | string collect --allow-empty)
        case 0
            printf '%s\n' $answer
    end
end

for program in @PROGRAMS@
    complete -c $program -e
    complete -c $program -k -f -a '(__kueue_complete)'
end
set -e program
"""

_TCSH = (
    'complete @PROGRAM@ \'p@*@`env _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=tcsh _ARGCOMPLETE_IFS=" "'
    ' sh -c "kueue 8>&1 >/dev/null 2>&1 </dev/null"`@\' ;\n'
)

_POWERSHELL = r"""# Completion of kueue for PowerShell. In $PROFILE:
#   kueue complete powershell | Out-String | Invoke-Expression
Register-ArgumentCompleter -Native -CommandName @QUOTED@ -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $line = $commandAst.ToString()
    $length = [Math]::Max(0, $cursorPosition - $commandAst.Extent.StartOffset)
    $line = $line.PadRight($length).Substring(0, $length)
    $asked = [ordered]@{
        COMP_LINE = $line
        COMP_POINT = "$length"
        _ARGCOMPLETE = '1'
        _ARGCOMPLETE_SHELL = 'powershell'
        _ARGCOMPLETE_IFS = "`n"
        _ARGCOMPLETE_DFS = "`t"
        _ARGCOMPLETE_STDOUT_FILENAME = [System.IO.Path]::GetTempFileName()
    }
    try {
        foreach ($name in $asked.Keys) { Set-Item -LiteralPath "Env:$name" -Value $asked[$name] }
        & kueue 2>&1 | Out-Null
        Get-Content -LiteralPath $asked['_ARGCOMPLETE_STDOUT_FILENAME'] -Encoding utf8 | ForEach-Object {
            $value, $description = $_ -split "`t", 2
            if ($value) {
                if (-not $description) { $description = $value }
                [System.Management.Automation.CompletionResult]::new($value, $value, 'ParameterValue', $description)
            }
        }
    } finally {
        foreach ($name in $asked.Keys) { Remove-Item -LiteralPath "Env:$name" -ErrorAction SilentlyContinue }
        Remove-Item -LiteralPath $asked['_ARGCOMPLETE_STDOUT_FILENAME'] -ErrorAction SilentlyContinue
    }
}
"""

_ELVISH = r"""# Completion of kueue for elvish. In ~/.config/elvish/rc.elv: eval (kueue complete elvish | slurp)
use str
var kueue-complete~ = {|@words|
    # The line as a POSIX shell would write it, whatever elvish allows in a word.
    var quoted = [(each {|word| put "'"(str:replace "'" "'\\''" $word)"'" } $words[..-1])]
    var last = $words[-1]
    if (not-eq $last '') { set last = "'"(str:replace "'" "'\\''" $last)"'" }
    var line = (str:join ' ' [$@quoted $last])
    try {
        env COMP_LINE=$line _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=elvish _ARGCOMPLETE_IFS="\n" _ARGCOMPLETE_DFS="\t" ^
            _ARGCOMPLETE_STDOUT_FILENAME=/dev/stdout kueue 2>/dev/null | each {|line|
                var value description = (str:split &max=2 "\t" $line)
                var suffix = ' '
                if (or (str:has-suffix $value '=') (str:has-suffix $value '/')) { set suffix = '' }
                var display = $value
                if (not-eq $description '') { set display = $value'  ('$description')' }
                edit:complex-candidate $value &display=$display &code-suffix=$suffix
            }
    } catch failure { nop }
}
for program [@PROGRAMS@] {
    set edit:completion:arg-completer[$program] = $kueue-complete~
}
"""

_SCRIPTS = {
    "bash": _BASH,
    "zsh": _ZSH,
    "fish": _FISH,
    "tcsh": _TCSH,
    "powershell": _POWERSHELL,
    "elvish": _ELVISH,
}
