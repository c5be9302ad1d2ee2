# Completion of kueue for fish. In ~/.config/fish/config.fish: kueue complete fish | source
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
        case 10
            set -l token (commandline -ct)
            if string match -q -- '-*=*' $token
                set -l parts (string split -m 1 = -- $token)
                for found in (__fish_complete_path $parts[2])
                    echo $parts[1]=$found
                end
            else
                __fish_complete_path $token
            end
        case 11
            set -l rest (string escape -- $words[(math $answer + 1)..-1])
            complete -C (string join ' ' -- $rest (commandline -ct) | string collect --allow-empty)
        case 0
            printf '%s\n' $answer
    end
end

for program in kueue kueue_server kueue_worker kueue_restart_workers kueue_install
    complete -c $program -e
    complete -c $program -k -f -a '(__kueue_complete)'
end
set -e program
