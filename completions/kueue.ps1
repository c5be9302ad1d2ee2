# Completion of kueue for PowerShell. In $PROFILE:
#   kueue complete powershell | Out-String | Invoke-Expression
Register-ArgumentCompleter -Native -CommandName 'kueue', 'kueue_server', 'kueue_worker', 'kueue_restart_workers', 'kueue_install' -ScriptBlock {
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
