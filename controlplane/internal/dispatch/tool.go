package dispatch

import (
	"context"
	"errors"
	"fmt"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// toolRequest is the script of a Python tool's call, its secrets sealed to the
// call's runner.
func (d *Dispatcher) toolRequest(ctx context.Context, c run.Call, inv tool.Invocation) ([]byte, error) {
	var q wire.ToolRequest
	var secrets wire.ToolSecrets
	switch {
	case d.Boxes == nil || d.Settings == nil:
		return nil, errors.New("no keys to seal secrets with")
	case inv.Inquiry != nil:
		q, secrets = wireInquiry(*inv.Inquiry)
	case inv.Function != nil:
		set, err := d.Settings.SettingsOf(ctx, c.Workspace, inv.Function.User, inv.Function.Pin)
		if err != nil {
			return nil, fmt.Errorf("settings of tool %s: %w", inv.Function.ID, err)
		}
		q, secrets = wireFunction(*inv.Function), wireSettings(set)
	default:
		return nil, errors.New("nothing to call")
	}
	key, err := d.Boxes.Box(c.Runner)
	if err != nil {
		return nil, err
	}
	plain, err := strictjson.Encode(secrets)
	if err != nil {
		return nil, errors.New("the secrets are not JSON") // its error could quote them
	}
	if q.Sealed, err = envelope.SealBox(key, c.ID, plain); err != nil {
		return nil, err
	}
	return strictjson.Encode(q)
}

func wireInquiry(q tool.Inquiry) (wire.ToolRequest, wire.ToolSecrets) {
	out := wire.ToolRequest{Op: q.Ask, ID: q.ID, Content: q.Content, Which: q.Which, ReplyTo: q.ReplyTo}
	if q.Ask == wire.ToolValidate {
		return out, wire.ToolSecrets{Values: q.Values}
	}
	return out, wire.ToolSecrets{Valves: q.Values}
}

func wireFunction(f tool.Function) wire.ToolRequest {
	return wire.ToolRequest{Op: wire.ToolCall, ID: f.ID, Content: f.Content, Function: f.Name, Arguments: f.Arguments}
}

func wireSettings(s pytool.Settings) wire.ToolSecrets {
	role := "user"
	if s.User.Admin {
		role = "admin"
	}
	return wire.ToolSecrets{
		Valves: s.Valves, UserValves: s.UserValves,
		User: &wire.ToolUser{ID: s.User.ID, Name: s.User.Name, Role: role},
	}
}
