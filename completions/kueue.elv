# Completion of kueue for elvish. In ~/.config/elvish/rc.elv: eval (kueue complete elvish | slurp)
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
for program [kueue kueue_server kueue_worker kueue_restart_workers kueue_install] {
    set edit:completion:arg-completer[$program] = $kueue-complete~
}
